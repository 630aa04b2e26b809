"""Dispatch of live requests to workers, and re-dispatch when a worker is lost.

    parked (a worker is missing) ──▶ dispatched ──▶ parked (its core or detokenizer is lost: a new attempt)

A request is resumable from its token ids: it is sent again with the output received so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from quintet.frontend.load_balancing.engine_selector import EngineSelector
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.reconcile import MAX_TOKENIZER_DEATHS
from quintet.frontend.streams import Stream
from quintet.process.work_journal import REQUEST, WorkId
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Cancel, Started
from quintet.wire.metrics import Metrics
from quintet.wire.params import shown
from quintet.wire.supervision import SlotState, Topology

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
    return RequestError(
        ErrorCode.INVALID,
        "The request holds an integer of more than 64 bits, or text with a lone surrogate, and cannot be encoded: "
        f"{shown(str(error))}. Correct the field.",
    )


class Dispatcher:
    """Assigns workers to requests, and reassigns them after a loss."""

    def __init__(self, ledger: LoadLedger, send: Send, config: EngineConfig, metrics: Metrics) -> None:
        self._ledger, self._workers = ledger, ledger.workers
        self._selector = EngineSelector(ledger, config)
        self._send = send
        self._parked: list[Stream] = []
        self._lost_epochs: dict[int, int] = {}
        """Newest lost epoch of each detokenizer index."""
        self._resumed = {
            role: metrics.counter("resumed_requests", "Requests resumed after the loss of a process.", role=str(role))
            for role in (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
        }  # fmt: skip

    def place(self, stream: Stream) -> None:
        """Assign workers to a request and send it, or park it until the topology has all of them."""
        choice, detokenizer = self._selector.choose(stream), self._ledger.pick(Role.DETOKENIZER)
        if choice is None or detokenizer is None:
            self._parked.append(stream)
            return
        submit = stream.submit
        submit.core, submit.spec.detokenizer = choice.index, detokenizer
        submit.spec.topology = self._workers.topology.version
        if not self._send_to_tokenizer(stream):
            self._parked.append(stream)
            return
        stream.choice = choice
        self._ledger.place(stream, choice)
        self._selector.note_sent(stream, choice)

    def _send_to_tokenizer(self, stream: Stream) -> bool:
        """Send a request to a tokenizer; False without one."""
        tokenizer = self._ledger.pick(Role.TOKENIZER)
        if tokenizer is None:
            return False
        stream.submit.sent_ns = time.monotonic_ns()
        for message in stream.messages():
            if not self._send(Role.TOKENIZER, tokenizer, message):
                return False
        stream.tokenizer = tokenizer
        if stream.started is None:
            self._ledger.encode(stream, tokenizer)
        return True

    def note_start(self, stream: Stream, started: Started) -> None:
        """Note the end of the request's prefill, in its first or a later attempt."""
        self._ledger.start(stream)
        self._selector.note_start(stream, started)

    def release(self, stream: Stream) -> None:
        """Remove a request from the load of its workers: it ends or is dispatched anew."""
        if stream.tokenizer is None:
            self._parked = [parked for parked in self._parked if parked is not stream]
            return
        self._ledger.remove(stream)
        stream.tokenizer = None

    def send_cancel(self, stream: Stream) -> bool:
        """Send a cancellation over the request's own path. False if no worker has the request."""
        if stream.tokenizer is None:
            return False
        ids = [choice.request_id for choice in stream.choices if choice.finish is None]
        return self._send(
            Role.TOKENIZER, stream.tokenizer, Cancel(ids, stream.submit.core, stream.is_retained)
        )

    def is_stale(self, sender: tuple[int, int]) -> bool:
        """True if text comes from a lost detokenizer; its requests were dispatched anew."""
        index, epoch = sender
        lost = self._lost_epochs.get(index)
        return lost is not None and epoch <= lost

    def follow(self, topology: Topology, streams: Iterable[Stream]) -> list[Stream]:
        """Re-dispatch requests of lost workers. Returns the requests to end: cancelled ones, which no worker will end, and
        poison requests (`MAX_TOKENIZER_DEATHS`).
        """
        unended: list[Stream] = []
        lost = self._workers.follow(topology)
        for worker in lost:
            if worker.role is Role.DETOKENIZER:
                self._lost_epochs[worker.index] = worker.epoch
            elif worker.role in (Role.CORE, Role.EXECUTOR):
                self._selector.lose(worker)
                if worker.role is Role.CORE:
                    self._unpin(worker.index)
        retiring = self._retiring(topology)
        if lost or retiring:
            for stream in list(streams):
                if stream.tokenizer is not None and self._handle_loss(stream, lost, retiring):
                    unended.append(stream)
        self._move_off_unready_engines(streams)
        return unended

    def _move_off_unready_engines(self, streams: Iterable[Stream]) -> None:
        """Move requests off engines without a ready executor, once another engine is ready.

        They were sent there while no engine was ready, or their executor died at such a time.
        """
        waiting = self._workers.unready_engines()
        if not waiting or not self._workers.ready_engines():
            return
        for stream in list(streams):
            if stream.tokenizer is not None and stream.submit.core in waiting:
                self._move(stream)

    def take_parked(self) -> list[Stream]:
        """Return the parked requests, to `place` each."""
        parked, self._parked = self._parked, []
        return parked

    def _retiring(self, topology: Topology) -> frozenset[int]:
        """Return the detokenizers to drain, if there is another one."""
        if self._ledger.pick(Role.DETOKENIZER) is None:
            return frozenset()
        return frozenset(
            slot.worker.index
            for slot in topology.slots
            if slot.worker.role is Role.DETOKENIZER and slot.state is SlotState.RETIRING
        )

    def _handle_loss(self, stream: Stream, lost: list[WorkerId], retiring: frozenset[int]) -> bool:
        """Handle the loss of a request's worker. Returns whether the request ends here, because no worker will end it."""
        submit = stream.submit
        for worker in lost:
            match worker.role:
                case Role.CORE if worker.index == submit.core:
                    stream.pinned_core = None
                    return self._park(stream, Role.CORE)
                case Role.EXECUTOR if worker.index == submit.core and self._move(stream):
                    return False
                case Role.DETOKENIZER if worker.index == submit.spec.detokenizer:
                    return self.restart(stream, Role.DETOKENIZER)
        for worker in lost:
            if worker.role is Role.TOKENIZER and worker.index == stream.tokenizer:
                return self._lose_tokenizer(stream)
        if submit.spec.detokenizer in retiring and not stream.is_cancelled:
            return self.restart(stream, Role.DETOKENIZER)
        return False

    def _move(self, stream: Stream) -> bool:
        """Move a request off an engine with a lost or starting executor. False if it cannot move."""
        if stream.is_cancelled or not self._selector.can_leave(stream):
            return False
        assert stream.tokenizer is not None
        stream.mark_suspect()
        ids = [choice.request_id for choice in stream.choices if choice.finish is None]
        self._send(Role.TOKENIZER, stream.tokenizer, Cancel(ids, stream.submit.core, moved=True))
        stream.pinned_core = None
        self._park(stream, Role.EXECUTOR)
        return True

    def _unpin(self, engine: int) -> None:
        """Unpin parked requests from a lost engine."""
        for stream in self._parked:
            if stream.pinned_core == engine:
                stream.pinned_core = None

    def restart(self, stream: Stream, role: Role) -> bool:
        """Park a request for a new attempt at its engine; a cancelled one is dropped."""
        stream.pinned_core = stream.submit.core
        return self._park(stream, role)

    def _park(self, stream: Stream, role: Role) -> bool:
        if stream.is_cancelled:
            self.send_cancel(stream)
            return True
        self._resumed[role].inc()
        self.release(stream)
        stream.attempt += 1
        self._parked.append(stream)
        return False

    def _lose_tokenizer(self, stream: Stream) -> bool:
        """Resend to another tokenizer a request that the lost one may not have forwarded. The core drops a duplicate attempt.

        Returns whether the request ends here.
        """
        was_passed_on = stream.attempt == 0 and stream.started is not None
        was_encoded = any(
            WorkId(REQUEST, choice.request_id) in self._workers.work_lost for choice in stream.choices
        )
        stream.num_tokenizer_deaths = stream.num_tokenizer_deaths + 1 if was_encoded else 0
        if stream.num_tokenizer_deaths >= MAX_TOKENIZER_DEATHS and not stream.is_cancelled:
            logging.getLogger("quintet").warning(
                "request %d rejected: it ended tokenizers", stream.request_id
            )
            return True
        if not was_passed_on and not stream.is_cancelled:
            self._resumed[Role.TOKENIZER].inc()
            stream.pinned_core = stream.submit.core  # the core may have it already
            self.release(stream)
            self._parked.append(stream)
            return False
        replacement = self._ledger.pick(Role.TOKENIZER)
        if replacement is not None:
            self._ledger.end_encoding(stream)
            stream.tokenizer = replacement
        was_cancelled = stream.is_cancelled and replacement is not None and self.send_cancel(stream)
        return stream.is_cancelled and not (was_passed_on and was_cancelled)
