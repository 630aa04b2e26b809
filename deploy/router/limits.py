"""Rate limits per API key: concurrent requests, and requests per minute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from quintet.wire.errors import ErrorCode, RequestError

MAX_IDLE = 1 << 16
"""Idle keys with a remembered rate."""


class _Account:
    __slots__ = ("allowance", "at_s", "num_open")

    def __init__(self, allowance: float, at_s: float) -> None:
        self.num_open, self.allowance, self.at_s = 0, allowance, at_s


class Limits:
    """Accounts of all keys. Requests without a key share one account. Without a limit there are no accounts."""

    def __init__(
        self, max_open: int, per_minute: int, now_s: Callable[[], float], max_idle: int = MAX_IDLE
    ) -> None:
        """0: no limit. ``max_idle``: number of remembered idle accounts."""
        self._max_open, self._per_minute, self._now_s, self._max_idle = max_open, per_minute, now_s, max_idle
        self._open: dict[bytes, _Account] = {}
        self._idle: OrderedDict[bytes, _Account] = OrderedDict()
        """Most recently used last."""

    def __len__(self) -> int:
        """Number of accounts in memory."""
        return len(self._open) + len(self._idle)

    def begin_request(self, key: bytes) -> bytes:
        """Count a request of this key; return the account name for `end_request`. Raises `RequestError` with a retry delay."""
        if not (self._max_open or self._per_minute):
            return b""
        name = blake2b(key, digest_size=16).digest()
        account = self._open.get(name) or self._idle.pop(name, None)
        if account is None:
            account = _Account(float(self._per_minute), self._now_s())
        try:
            self._charge(account)
        finally:
            self._keep(name, account)
        return name

    def end_request(self, name: bytes) -> None:
        account = self._open.get(name)
        if account is not None:
            account.num_open -= 1
            self._keep(name, account)

    def _charge(self, account: _Account) -> None:
        if self._max_open and account.num_open >= self._max_open:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"This key has {account.num_open} requests in progress, but at most {self._max_open} are allowed: wait for "
                "one to end.",
                retry_s=1,
            )
        if self._per_minute:
            rate, now = self._per_minute / 60, self._now_s()
            account.allowance = min(self._per_minute, account.allowance + (now - account.at_s) * rate)
            account.at_s = now
            if account.allowance < 1:
                wait_s = int((1 - account.allowance) / rate) + 1
                raise RequestError(
                    ErrorCode.OVERLOADED,
                    f"This key has sent {self._per_minute} requests a minute, which is its limit: retry in {wait_s} s.",
                    retry_s=wait_s,
                )
            account.allowance -= 1
        account.num_open += 1

    def _keep(self, name: bytes, account: _Account) -> None:
        if account.num_open:
            self._open[name] = account
            return
        self._open.pop(name, None)
        if self._per_minute:  # otherwise an idle account has no state
            self._idle[name] = account
            if len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)
