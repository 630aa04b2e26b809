"""Dispatch of live requests to workers: parked until a worker of each role is available, then sent.

`quintet.frontend.load_balancing.loss_recovery` dispatches them again after the loss of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from quintet.frontend.load_balancing.engine_selector import EngineSelector
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.streams import Stream
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.ids import Role
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Cancel, Started
from quintet.wire.params import shown

Send = Callable[[Role, int, msgspec.Struct], bool]
"""`quintet.process.sockets.Peers.send`: queues a message for a peer; False without such a peer."""


def too_large(error: FrameTooLarge) -> RequestError:
    """Build the error for a request larger than the message limit."""
    return RequestError(
        ErrorCode.TOO_LARGE,
        f"The request takes {error.num_bytes} bytes inside the server; the limit is {error.most}. Send a smaller request, "
        "or raise --max-body-bytes.",
    )


UNENCODABLE = (OverflowError, UnicodeEncodeError)
"""Errors of the encoder for values that no message can hold."""


def not_encodable(error: Exception) -> RequestError:
    """Build the error for a request that no message can hold."""
    if isinstance(error, FrameTooLarge):
        return too_large(error)
    return invalid(
        "The request holds an integer of more than 64 bits, or text with a lone surrogate, and cannot be encoded: "
        f"{shown(str(error))}. Correct the field.",
    )


class Dispatcher:
    """Assigns workers to requests."""

    def __init__(self, ledger: LoadLedger, send: Send, config: EngineConfig) -> None:
        self.ledger = ledger
        self.selector = EngineSelector(ledger, config)
        self._send = send
        self.parked: list[Stream] = []

    def place(self, stream: Stream) -> None:
        """Assign workers to a request and send it, or park it until the topology has all of them."""
        choice, detokenizer = self.selector.choose(stream), self.ledger.pick(Role.DETOKENIZER)
        if choice is None or detokenizer is None:
            self.parked.append(stream)
            return
        submit = stream.submit
        submit.core, submit.spec.detokenizer = choice.index, detokenizer
        submit.spec.topology = self.ledger.workers.topology.version
        if not self._send_to_tokenizer(stream):
            self.parked.append(stream)
            return
        stream.choice = choice
        self.ledger.place(stream, choice)
        self.selector.note_sent(stream, choice)

    def _send_to_tokenizer(self, stream: Stream) -> bool:
        """Send a request to a tokenizer; False without one."""
        tokenizer = self.ledger.pick(Role.TOKENIZER)
        if tokenizer is None:
            return False
        stream.submit.sent_ns = time.monotonic_ns()
        for message in stream.messages():
            if not self._send(Role.TOKENIZER, tokenizer, message):
                return False
        stream.tokenizer = tokenizer
        if stream.started is None:
            self.ledger.encode(stream, tokenizer)
        return True

    def note_start(self, stream: Stream, started: Started) -> None:
        """Note the end of the request's prefill, in its first or a later attempt."""
        self.ledger.start(stream)
        self.selector.note_start(stream, started)

    def release(self, stream: Stream) -> None:
        """Remove a request from the load of its workers: it ends or is dispatched anew."""
        if stream.tokenizer is None:
            self.parked = [parked for parked in self.parked if parked is not stream]
            return
        self.ledger.remove(stream)
        stream.tokenizer = None

    def send_cancel(self, stream: Stream, *, moved: bool = False) -> bool:
        """Send a cancellation over the request's own path; ``moved``: see `Cancel`. False if no worker has the request."""
        if stream.tokenizer is None:
            return False
        ids = [choice.request_id for choice in stream.choices if choice.finish is None]
        cancel = Cancel(ids, stream.submit.core, stream.is_retained, moved)
        return self._send(Role.TOKENIZER, stream.tokenizer, cancel)

    def take_parked(self) -> list[Stream]:
        """Return the parked requests, to `place` each."""
        parked, self.parked = self.parked, []
        return parked
