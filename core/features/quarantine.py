"""Quarantine: while suspects are tried for making the executor fail, only they run.

Who is tried, and for how long, is `quintet.core.poison_isolation.suspects`' to say, by way of `SchedulerState.trial`.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Quarantine is always on: without a trial it stops nobody."""
    return Feature("quarantine", gate=gate)


def gate(state: SchedulerState, request: Request) -> bool:
    """Hold back whoever is not on trial."""
    return state.may_run(request)
