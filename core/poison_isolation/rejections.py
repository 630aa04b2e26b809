"""Rejection list of poison requests: those that made the executor fail, for `REJECTION_TTL_S`.

A request is identified by a fingerprint of its prompt and sampling parameters, without seed and number of choices.
The table is bounded and forgets the oldest entry first. Reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from quintet.core.requests.request import Request
from quintet.wire.codec import encode, pack_i32
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Admit, Failed
from quintet.wire.params import SamplingParams

REJECTION_TTL_S = 600
"""TTL of an entry: a repeated poison request then interrupts other requests every ten minutes, not every second."""

MAX_REJECTIONS = 1024


def fingerprint(prompt_ids: bytes, params: SamplingParams, embeds: Sequence[EmbedsSpan] = ()) -> bytes:
    """Return the fingerprint of prompt and parameters. ``prompt_ids``: int32."""
    settings = encode(msgspec.structs.replace(params, seed=None, n=1))
    settings += b"".join(span.start.to_bytes(4, "little") + span.digest for span in embeds)
    return sha256(len(prompt_ids).to_bytes(8, "little") + prompt_ids + settings).digest()


def fingerprint_of(request: Request) -> bytes:
    """Return the fingerprint of an admitted request."""
    return fingerprint(pack_i32(request.tokens[: request.num_prompt]), request.spec.params, request.embeds)


class Rejections:
    """Fingerprints of poison requests, with cause and expiry."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        """Fingerprint -> expiry and cause, oldest first."""

    def add(self, key: bytes, cause: str, now_ns: int) -> None:
        """Reject requests with this fingerprint from now on."""
        self.entries[key] = (now_ns + REJECTION_TTL_S * 1_000_000_000, cause)
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_REJECTIONS:
            self.entries.popitem(last=False)

    def answer_to(self, admit: Admit, now_ns: int) -> Failed | None:
        """Return the rejection of a request, or None."""
        key = fingerprint(admit.prompt_ids, admit.spec.params, admit.embeds)
        entry = self.entries.get(key)
        if entry is None:
            return None
        until_ns, cause = entry
        if until_ns <= now_ns:
            del self.entries[key]
            return None
        left_s = -(-(until_ns - now_ns) // 1_000_000_000)
        message = (
            f"A request with the same prompt and the same parameters made the executor fail ({cause}), so this one was "
            f"rejected. Change the prompt or the parameters, or retry in {left_s} s."
        )
        return Failed(admit.request_id, ErrorCode.UNPROCESSABLE, message, retry_s=left_s)
