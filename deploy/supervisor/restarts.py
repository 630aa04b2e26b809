"""Restart policy with backoff and restart limit (restart intensity of Erlang/OTP supervisors)."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

from quintet.wire.ids import Role


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Immediate first restart, then exponential backoff, up to a limit."""

    max_deaths: int = 5
    """Deaths of one slot within the window; with more, the server gives up."""
    max_boot_deaths: int = 5
    """Deaths of a slot that was never ready, at any distance in time; with more, the server gives up."""
    window_s: float = 60.0
    first_backoff_s: float = 0.25
    max_backoff_s: float = 8.0

    def delay_s(self, deaths: deque[float], now: float, *, was_ready: bool = True) -> float | None:
        """Count a death and return the delay of the restart, or None to give up.

        ``deaths`` are the times of the slot's earlier deaths; it is mutated. Deaths before the window are dropped only
        for a slot that was ready: loading a model may take longer than the window.
        """
        if not was_ready:
            deaths.append(now)
            return None if len(deaths) > self.max_boot_deaths else self._backoff_s(len(deaths))
        pause_s = self.pause_s(deaths, now)
        return None if len(deaths) > self.max_deaths else pause_s

    def pause_s(self, deaths: deque[float], now: float) -> float:
        """Count a death and return the delay of the restart, without a limit."""
        while deaths and now - deaths[0] > self.window_s:
            deaths.popleft()
        deaths.append(now)
        return self._backoff_s(len(deaths))

    def _backoff_s(self, num_deaths: int) -> float:
        earlier = num_deaths - 1
        return 0.0 if earlier == 0 else min(self.max_backoff_s, self.first_backoff_s * 2 ** (earlier - 1))


def policy_of(role: Role, max_deaths: int | None = None) -> RestartPolicy:
    """Return the policy of a role. ``max_deaths`` overrides its limit.

    The executor gets a higher limit and a short backoff: poison isolation bisects the batch, and each half may cost a
    death. A limit above the default also shortens the backoff.
    """
    policy = RestartPolicy()
    if role is Role.EXECUTOR:
        policy = RestartPolicy(max_deaths=12, first_backoff_s=0.05, max_backoff_s=1.0)
    if max_deaths is None:
        return policy
    pause_s = policy.max_backoff_s if max_deaths <= policy.max_deaths else policy.first_backoff_s
    return dataclasses.replace(
        policy, max_deaths=max_deaths, max_boot_deaths=max_deaths, max_backoff_s=pause_s
    )
