"""In which order requests are served: a rank, unique for each, smaller first.

The rank alone orders the queue, the running list and, from its other end, the choice of a victim.
"""

from __future__ import annotations

from collections.abc import Callable

Policy = Callable[[int, int, int | None], tuple[int, int]]
"""From ``(priority, number of arrival, most outputs to go)`` to the rank.

The last is None when KV memory may not hold the request beside all others at full length."""


def fcfs(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """First come, first served."""
    return (0, arrival)


def by_priority(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Lower priority numbers first; among equals, first come, first served."""
    return (priority, arrival)


def longest(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Who may have the most outputs to go first, so that a batch does not end with a few long ones running alone.

    Those that memory may not hold come behind all others: many long ones together would push each other out.
    """
    return (0 if num_to_go is None else -num_to_go, arrival)


LATEST_GROUP = 32


def latest(priority: int, arrival: int, num_to_go: int | None) -> tuple[int, int]:
    """Who came last first, within groups of `LATEST_GROUP` that come in their order: so many, less one, may pass a request.

    Where more wait than are served, most get their first token sooner than first come, first served, and those that are
    passed far later; the mean stays (docs/performance.md, "First tokens where requests wait").
    """
    return (arrival // LATEST_GROUP, -arrival)


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": by_priority,
    "longest": longest,
    "latest": latest,
}
