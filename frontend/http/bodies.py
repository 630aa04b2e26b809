"""Buffers of request bodies: limits on unfinished ones, and their receive timeouts.

Bodies retained for a resend (`BodyBuffers.keep`) count toward the same limit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quintet.wire.errors import ErrorCode, RequestError

PROGRESS_S = 60.0
BYTES_PER_S = 4096
MAX_OPEN_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class OpenBody:
    """A body being received."""

    began_s: float
    """Start, by the event loop's clock."""
    waiting: asyncio.Timeout | None = None
    """Wait for the next chunk."""
    num_bytes: int = 0
    is_given_up: bool = False

    def give_up(self) -> None:
        """Cancel the wait of its reader."""
        self.is_given_up = True
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class BodyBuffers:
    """Limits of request bodies, and the bodies being received."""

    max_bytes: int
    """Maximum size of a body."""
    progress_s: float = PROGRESS_S
    """Maximum wait for the next chunk, and grace period before the minimum rate applies."""
    bytes_per_s: float = BYTES_PER_S
    """Minimum mean rate of a body."""
    max_open_bytes: int = MAX_OPEN_BYTES
    """Maximum bytes of unfinished and retained bodies together."""
    num_open_bytes: int = 0
    num_retained_bytes: int = 0
    _open: dict[OpenBody, None] = field(default_factory=dict)
    """In order of the last chunk, oldest first."""

    def open(self) -> OpenBody:
        """Start receiving a body; `close` it after."""
        body = OpenBody(asyncio.get_running_loop().time())
        self._open[body] = None
        return body

    def grow(self, body: OpenBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self.num_open_bytes += num_bytes
        del self._open[body]
        self._open[body] = None

    def next_chunk_timeout_s(self, body: OpenBody) -> tuple[float, bool]:
        """Return the timeout of the next chunk, and True if the minimum rate sets it."""
        due_s = body.began_s + self.progress_s + body.num_bytes / self.bytes_per_s
        left_s = due_s - asyncio.get_running_loop().time()
        return (left_s, True) if left_s < self.progress_s and body.num_bytes else (self.progress_s, False)

    def enforce_limit(self) -> None:
        """Give up the bodies that have been idle longest, until the rest is within the limit.

        The newest are not given up: a client that sends a byte now and then would keep out all others.
        """
        num_left = self.num_open_bytes + self.num_retained_bytes
        for body in self._open:
            if num_left <= self.max_open_bytes:
                return
            num_left -= body.num_bytes
            if not body.is_given_up:
                body.give_up()

    def close(self, body: OpenBody) -> None:
        """Remove a body that is complete or given up."""
        self.num_open_bytes -= body.num_bytes
        del self._open[body]

    def retain(self, num_bytes: int) -> None:
        """Count a body retained until its request ends (`release`). Raises `RequestError` above the limit."""
        num_held = self.num_open_bytes + self.num_retained_bytes
        if self.num_retained_bytes and num_held + num_bytes > self.max_open_bytes:
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{num_held} bytes of request bodies are held, and the {num_bytes} of this one would "
                f"exceed the limit of {self.max_open_bytes}; retry later, or send a smaller body.",
                retry_s=1,
            )
        self.num_retained_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Release a retained body after its request ended."""
        self.num_retained_bytes -= num_bytes
