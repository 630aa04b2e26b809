"""What this process holds of request bodies that have not arrived whole, and how long it waits for the rest.

Whoever keeps bodies that have come, to send them again, counts them here too (`BodyBuffers.keep`): then all stay
within one limit.
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
    """A body of which more is to come."""

    began_s: float
    """By the loop's clock."""
    waiting: asyncio.Timeout | None = None
    """The wait for its next piece."""
    num_bytes: int = 0
    is_given_up: bool = False

    def give_up(self) -> None:
        """Let its reader wait no longer."""
        self.is_given_up = True
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class BodyBuffers:
    """The limits of request bodies, and those being received."""

    max_bytes: int
    """Largest body taken."""
    progress_s: float = PROGRESS_S
    """Longest wait for the next piece of a body; and how long after its beginning its rate is not looked at."""
    bytes_per_s: float = BYTES_PER_S
    """Least rate at which a body must come, on average."""
    max_open_bytes: int = MAX_OPEN_BYTES
    """Most bytes of unfinished bodies, and those that are kept, together."""
    num_open_bytes: int = 0
    num_kept_bytes: int = 0
    _open: dict[OpenBody, None] = field(default_factory=dict)
    """The one that has waited longest for its next piece first."""

    def open(self) -> OpenBody:
        """Begin to receive a body; `close` it."""
        body = OpenBody(asyncio.get_running_loop().time())
        self._open[body] = None
        return body

    def grow(self, body: OpenBody, num_bytes: int) -> None:
        """Count a piece that came."""
        body.num_bytes += num_bytes
        self.num_open_bytes += num_bytes
        del self._open[body]
        self._open[body] = None

    def patience_s(self, body: OpenBody) -> tuple[float, bool]:
        """Return how long to wait for its next piece, and whether its rate says so: then it came too slowly."""
        due_s = body.began_s + self.progress_s + body.num_bytes / self.bytes_per_s
        left_s = due_s - asyncio.get_running_loop().time()
        return (left_s, True) if left_s < self.progress_s and body.num_bytes else (self.progress_s, False)

    def make_room(self) -> None:
        """Give up on the bodies that have waited longest, until the others are within the limit.

        Not on those that came last: who drips a byte now and then would keep out everybody else.
        """
        num_left = self.num_open_bytes + self.num_kept_bytes
        for body in self._open:
            if num_left <= self.max_open_bytes:
                return
            num_left -= body.num_bytes
            if not body.is_given_up:
                body.give_up()

    def close(self, body: OpenBody) -> None:
        """Forget a body: it is complete, or nobody waits for the rest."""
        self.num_open_bytes -= body.num_bytes
        del self._open[body]

    def keep(self, num_bytes: int) -> None:
        """Count a body that is kept until its request has ended (`let_go`). Raises `RequestError` where it is too much."""
        num_held = self.num_open_bytes + self.num_kept_bytes
        if self.num_kept_bytes and num_held + num_bytes > self.max_open_bytes:
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{num_held} bytes of the bodies of open requests are held, and with the {num_bytes} of this one it would be "
                f"more than {self.max_open_bytes}; try again when some have ended, or send less.",
                retry_s=1,
            )
        self.num_kept_bytes += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """The request of a kept body has ended."""
        self.num_kept_bytes -= num_bytes
