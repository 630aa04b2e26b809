"""Thread count of an engine in a Ray actor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ray


def with_assigned_threads(flags: Mapping[str, object]) -> dict[str, object]:
    """Set ``threads`` to the actor's assigned CPUs unless set, so that actors of one node do not oversubscribe cores.

    GPUs need no setting: Ray makes only the assigned ones visible.
    """
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if "threads" in flags or assigned < 1:
        return dict(flags)
    return {**flags, "threads": math.ceil(assigned)}
