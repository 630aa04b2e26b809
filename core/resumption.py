"""Requests that go on elsewhere: a newer attempt at one that lives, and what is kept for a client that may come back.

Only ids are kept, no blocks: the prefix cache may still hold what was computed, and what it does not is computed again.
Reads no clock.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from quintet.core.request import Request
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.messages import Admit

MAX_KEPT_BYTES = 256 << 20
"""Ids kept for clients that may come back; of more, those that have waited longest are dropped."""

FIXED_BYTES = 1024
"""What a request takes to keep besides the bytes that came with it, about."""

MAX_MOVED = 1 << 16
"""Former ids that are remembered."""

_encode = msgspec.msgpack.Encoder().encode


def can_go_on(request: Request, admit: Admit) -> bool:
    """Return whether a live request serves a newer attempt at it: only its text must be told anew.

    Log-probabilities are not kept, so those that the frontend misses must be computed again.
    """
    seen = unpack_i32(admit.spec.output_ids)
    num_prompt = request.num_prompt
    if list(seen) != request.tokens[num_prompt : num_prompt + len(seen)]:
        return False
    params = admit.spec.params
    wants_missing = params.logprobs is not None and request.num_outputs > len(seen)
    return not wants_missing and params.prompt_logprobs is None


@dataclass(slots=True)
class RetainedRequest:
    """A request whose client may come back: as it was admitted, and the outputs of each choice so far."""

    admit: Admit
    admit_bytes: int
    """What the admission takes to keep, about."""
    until_ns: int = 0
    is_cut_off: bool = False
    """Whether it had not ended: its client was cut off in the middle."""
    outputs: dict[int, bytes] = field(default_factory=dict)
    """Id of the choice under its former frontend -> int32."""

    @property
    def num_bytes(self) -> int:
        """What it takes to keep, about."""
        return self.admit_bytes + sum(map(len, self.outputs.values()))

    def choices(self) -> list[tuple[int, bytes]]:
        """Return number and outputs of every choice, as `Reclaimed` tells them."""
        admit = self.admit
        first = admit.request_id - admit.spec.choice
        return [(request_id - first, outputs) for request_id, outputs in sorted(self.outputs.items())]


class RetainedRequests:
    """What is kept for clients that may come back, until their time is over."""

    def __init__(self, grace_ns: int, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._grace_ns = grace_ns
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[int, RetainedRequest] = OrderedDict()
        """By the request's first id; whose time ends first comes first."""
        self._first_of: dict[int, int] = {}
        self._moved: OrderedDict[int, int] = OrderedDict()
        """Former first ids of requests that went on under another."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_awaited(self) -> bool:
        """Whether a client that was cut off in the middle may still come back."""
        return any(kept.is_cut_off for kept in self._kept.values())

    def keep(self, request: Request, now_ns: int) -> None:
        """Keep what is known of a request that has left the state, if its client can come back for it."""
        origin = request.origin
        if origin is None or self._grace_ns <= 0:
            return
        first = request.first_id
        kept = self._kept.get(first)
        if kept is None:
            kept = self._kept[first] = RetainedRequest(origin, FIXED_BYTES + len(_encode(origin)))
            self._num_bytes += kept.num_bytes
        kept.until_ns = now_ns + self._grace_ns
        kept.is_cut_off |= request.is_departing
        self._num_bytes -= len(kept.outputs.get(request.request_id, b""))
        outputs = kept.outputs[request.request_id] = pack_i32(request.tokens[request.num_prompt :])
        self._num_bytes += len(outputs)
        self._first_of[request.request_id] = first
        self._kept.move_to_end(first)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, first: int, key: bytes) -> RetainedRequest | None:
        """Return the request of this first id, whatever it is now, if ``key`` is its client's."""
        kept = self._kept.get(self.newest(first))
        claim = None if kept is None else kept.admit.spec.claim
        return kept if claim is not None and hmac.compare_digest(claim.key, key) else None

    def newest(self, first: int) -> int:
        """Return the first id under which a request goes on."""
        while first in self._moved:
            first = self._moved[first]
        return first

    def rename(self, former: int, first: int) -> None:
        """Keep a request under another first id; its client may know it by the former one for ever."""
        former = self.newest(former)
        kept = self._kept.pop(former)
        for request_id in kept.outputs:
            del self._first_of[request_id]
        kept.outputs = {request_id - former + first: outputs for request_id, outputs in kept.outputs.items()}
        spec = msgspec.structs.replace(kept.admit.spec, choice=0)
        kept.admit = msgspec.structs.replace(kept.admit, request_id=first, spec=spec)
        self._kept[first] = kept
        for request_id in kept.outputs:
            self._first_of[request_id] = first
        self._moved[former] = first
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def take(self, request_id: int) -> bytes:
        """Return the outputs of a choice (int32) and forget it; none of one that is not kept."""
        first = self._first_of.pop(request_id, None)
        if first is None:
            return b""
        kept = self._kept[first]
        outputs = kept.outputs.pop(request_id)
        self._num_bytes -= len(outputs)
        if not kept.outputs:
            self._drop(first)
        return outputs

    def expire(self, now_ns: int) -> int:
        """Drop whose time is over; return how many requests that were."""
        num_dropped = 0
        while self._kept:
            first, kept = next(iter(self._kept.items()))
            if kept.until_ns > now_ns:
                break
            self._drop(first)
            num_dropped += 1
        return num_dropped

    def _drop(self, first: int) -> None:
        kept = self._kept.pop(first)
        self._num_bytes -= kept.num_bytes
        for request_id in kept.outputs:
            del self._first_of[request_id]
