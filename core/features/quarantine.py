"""Quarantine: during a poison-isolation trial, only the suspects on trial run.

`quintet.core.poison_isolation.suspects` selects them, through `SchedulerState.trial`.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Return the feature; it is always on and has no effect without a trial."""
    return Feature("quarantine", can_schedule=can_schedule)


def can_schedule(state: SchedulerState, request: Request) -> bool:
    """Delay requests that are not on trial."""
    return state.may_run(request)
