"""How much each key may have at once, and in a minute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from quintet.wire.errors import ErrorCode, RequestError

MAX_KEYS = 1 << 16
"""That are remembered while they have nothing open."""


class _Account:
    __slots__ = ("allowance", "at_s", "num_open")

    def __init__(self, allowance: float, at_s: float) -> None:
        self.num_open, self.allowance, self.at_s = 0, allowance, at_s


class Limits:
    """The accounts of all keys; whoever sends none shares one."""

    def __init__(self, max_open: int, per_minute: int, now_s: Callable[[], float]) -> None:
        """0: no limit."""
        self._max_open, self._per_minute, self._now_s = max_open, per_minute, now_s
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def enter(self, key: str) -> bytes:
        """Count a request of this key, and return what `leave` takes. Raises `RequestError` with when to try again."""
        name, now = blake2b(key.encode("latin-1", "replace"), digest_size=16).digest(), self._now_s()
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(float(self._per_minute), now)
            while len(self._accounts) > MAX_KEYS and not next(iter(self._accounts.values())).num_open:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(name)
        if self._max_open and account.num_open >= self._max_open:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{account.num_open} requests of this key are being answered, and {self._max_open} may be at once: wait for one "
                "to end.",
                retry_s=1,
            )
        if self._per_minute:
            rate = self._per_minute / 60
            account.allowance = min(self._per_minute, account.allowance + (now - account.at_s) * rate)
            account.at_s = now
            if account.allowance < 1:
                wait_s = int((1 - account.allowance) / rate) + 1
                raise RequestError(
                    ErrorCode.OVERLOADED,
                    f"This key may send {self._per_minute} requests a minute, and has: try again in {wait_s} s.",
                    retry_s=wait_s,
                )
            account.allowance -= 1
        account.num_open += 1
        return name

    def leave(self, name: bytes) -> None:
        """The request has ended."""
        self._accounts[name].num_open -= 1
