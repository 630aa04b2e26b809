"""When a dead process may be started again (the restart intensity of Erlang/OTP supervisors)."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

from quintet.wire.ids import Role


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At once the first time, then with exponential backoff, and not for ever."""

    max_deaths: int = 5
    """More deaths of one slot than this within the window, and the server gives up."""
    max_boot_deaths: int = 5
    """More deaths than this of a slot that was never ready, however far apart, and the server gives up."""
    window_s: float = 60.0
    first_backoff_s: float = 0.25
    max_backoff_s: float = 8.0

    def delay_s(self, deaths: deque[float], now: float, *, was_ready: bool = True) -> float | None:
        """Count a death and return how long to wait before the restart, or None to give up.

        ``deaths`` are the times of the slot's earlier deaths. Of a slot that was ready once, those that left the window
        are dropped; a model may take longer than the window to load.
        """
        if not was_ready:
            deaths.append(now)
            return None if len(deaths) > self.max_boot_deaths else self._backoff_s(len(deaths))
        pause_s = self.pause_s(deaths, now)
        return None if len(deaths) > self.max_deaths else pause_s

    def pause_s(self, deaths: deque[float], now: float) -> float:
        """Do the same for whoever never gives up."""
        while deaths and now - deaths[0] > self.window_s:
            deaths.popleft()
        deaths.append(now)
        return self._backoff_s(len(deaths))

    def _backoff_s(self, num_deaths: int) -> float:
        earlier = num_deaths - 1
        return 0.0 if earlier == 0 else min(self.max_backoff_s, self.first_backoff_s * 2 ** (earlier - 1))


def policy_of(role: Role, max_deaths: int | None = None) -> RestartPolicy:
    """Return the policy for a role; ``max_deaths`` if the operator wants another number.

    Which request makes the executor die is found by halving the batch, and each half costs a death: it may die more often,
    and the search does not wait long. Whoever allows many deaths wants no pauses either.
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
