"""Resumption: newer attempts of live requests, and requests retained for disconnected clients.

Only token ids are retained, no blocks: the prefix cache may still have them, otherwise they are recomputed. Reads no
clock.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from quintet.core.requests.request import Request
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.messages import Admit, Resume

MAX_RETAINED_BYTES = 256 << 20
"""Maximum bytes of retained ids; beyond it, the oldest requests are dropped."""

FIXED_BYTES = 1024
"""Approximate memory per retained request, without its message."""

MAX_MOVED = 1 << 16
"""Maximum number of former ids."""

_encode = msgspec.msgpack.Encoder().encode


def can_resume(request: Request, admit: Admit) -> bool:
    """Return True when a live request can serve a newer attempt by sending its text again.

    Log-probabilities are not retained, so those that the frontend lacks must be recomputed.
    """
    seen = unpack_i32(admit.spec.output_ids)
    num_prompt = request.num_prompt
    if list(seen) != request.tokens[num_prompt : num_prompt + len(seen)]:
        return False
    params = admit.spec.params
    wants_missing = params.logprobs is not None and request.num_outputs > len(seen)
    return not wants_missing and params.prompt_logprobs is None


def _has_key(admit: Admit | None, key: bytes) -> bool:
    resume_token = None if admit is None else admit.spec.resume_token
    return resume_token is not None and hmac.compare_digest(resume_token.key, key)


@dataclass(slots=True)
class RetainedRequest:
    """A retained request: its `Admit` message and the outputs of each choice so far."""

    admit: Admit
    admit_bytes: int
    """Approximate memory of the message."""
    until_ns: int = 0
    was_disconnected: bool = False
    """The client was disconnected before the request ended."""
    outputs: dict[int, bytes] = field(default_factory=dict)
    """Id of the choice under its former frontend -> int32."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        return self.admit_bytes + sum(map(len, self.outputs.values()))

    def choices(self) -> list[tuple[int, bytes]]:
        """Return index and outputs of every choice, for `Resumed`."""
        admit = self.admit
        first = admit.request_id - admit.spec.choice
        return [(request_id - first, outputs) for request_id, outputs in sorted(self.outputs.items())]


class RetainedRequests:
    """Retained requests, until their TTL expires."""

    def __init__(self, grace_ns: int, max_bytes: int = MAX_RETAINED_BYTES) -> None:
        self._grace_ns = grace_ns
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.kept: OrderedDict[int, RetainedRequest] = OrderedDict()
        """By the request's first id; earliest expiry first."""
        self._first_of: dict[int, int] = {}
        self._moved: OrderedDict[int, int] = OrderedDict()
        """Former first id -> newer first id of renamed requests."""

    @property
    def is_awaited(self) -> bool:
        """True while a client disconnected before the end may reconnect."""
        return any(kept.was_disconnected for kept in self.kept.values())

    def add(self, request: Request, now_ns: int) -> None:
        """Retain an ended request, if it is resumable."""
        origin = request.delivery.origin
        if origin is None or self._grace_ns <= 0:
            return
        first = request.first_id
        kept = self.kept.get(first)
        if kept is None:
            kept = self.kept[first] = RetainedRequest(origin, FIXED_BYTES + len(_encode(origin)))
            self._num_bytes += kept.num_bytes
        kept.until_ns = now_ns + self._grace_ns
        kept.was_disconnected |= request.is_draining
        self._num_bytes -= len(kept.outputs.get(request.request_id, b""))
        outputs = kept.outputs[request.request_id] = pack_i32(request.tokens[request.num_prompt :])
        self._num_bytes += len(outputs)
        self._first_of[request.request_id] = first
        self.kept.move_to_end(first)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self.kept)))

    def find(self, first: int, key: bytes) -> RetainedRequest | None:
        """Return the request of this first id, after renames, if ``key`` matches its resume token."""
        kept = self.kept.get(self.newest(first))
        return kept if kept is not None and _has_key(kept.admit, key) else None

    def is_claimed(self, request: Request, message: Resume) -> bool:
        """Return True for a live choice of the request that a client resumes."""
        origin = request.delivery.origin
        is_named = origin is not None and request.first_id == self.newest(message.request_id)
        return is_named and _has_key(origin, message.key)

    def newest(self, first: int) -> int:
        """Return the current first id of a request."""
        while first in self._moved:
            first = self._moved[first]
        return first

    def rename(self, former: int, first: int) -> None:
        """Rename a retained request; its client may use the former id without limit."""
        former = self.newest(former)
        if former == first:
            return
        kept = self.kept.pop(former)
        for request_id in kept.outputs:
            del self._first_of[request_id]
        kept.outputs = {request_id - former + first: outputs for request_id, outputs in kept.outputs.items()}
        spec = msgspec.structs.replace(kept.admit.spec, choice=0)
        kept.admit = msgspec.structs.replace(kept.admit, request_id=first, spec=spec)
        self.kept[first] = kept
        for request_id in kept.outputs:
            self._first_of[request_id] = first
        self._moved[former] = first
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def take(self, request_id: int) -> bytes:
        """Return the outputs of a choice (int32) and forget it; empty if it is not retained."""
        first = self._first_of.pop(request_id, None)
        if first is None:
            return b""
        kept = self.kept[first]
        outputs = kept.outputs.pop(request_id)
        self._num_bytes -= len(outputs)
        if not kept.outputs:
            self._drop(first)
        return outputs

    def expire(self, now_ns: int) -> None:
        """Drop expired requests."""
        while self.kept:
            first, kept = next(iter(self.kept.items()))
            if kept.until_ns > now_ns:
                return
            self._drop(first)

    def _drop(self, first: int) -> None:
        kept = self.kept.pop(first)
        self._num_bytes -= kept.num_bytes
        for request_id in kept.outputs:
            del self._first_of[request_id]
