"""Scheduling policies: the rank of a request, unique and smaller first.

The rank orders the queue and the running list. The request with the largest rank is preempted first.
"""

from __future__ import annotations

from collections.abc import Callable

Policy = Callable[[int, int, int | None], tuple[int, int]]
"""Map ``(priority, arrival number, maximum remaining outputs)`` to the rank.

The last is None when KV memory may not hold the request and all others at full length.
"""


def fcfs(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """First come, first served."""
    return (0, arrival)


def by_priority(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Lower priority numbers first; first come, first served within a priority."""
    return (priority, arrival)


def longest(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Most remaining outputs first, so that a batch does not end with a few long requests.

    Requests that memory may not hold come last: many long ones together would preempt each other.
    """
    return (0 if num_to_go is None else -num_to_go, arrival)


LATEST_GROUP = 32


def latest(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Last come, first served, within groups of `LATEST_GROUP` arrivals; so at most that many, less one, pass a request.

    Under overload most requests get their first token sooner than with FCFS, and the passed ones much later. The mean
    is equal (docs/performance.md, "First tokens where requests wait").
    """
    return (arrival // LATEST_GROUP, -arrival)


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": by_priority,
    "longest": longest,
    "latest": latest,
}
