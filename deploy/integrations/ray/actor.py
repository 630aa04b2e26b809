"""What an engine in an actor may use of its node: as many processors as Ray gave it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ray


def with_its_processors(flags: Mapping[str, object]) -> dict[str, object]:
    """Add ``threads`` to an engine's flags, unless they have it: two actors of one node must not both take every core.

    GPUs need nothing: Ray shows an actor only its own.
    """
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if "threads" in flags or assigned < 1:
        return dict(flags)
    return {**flags, "threads": math.ceil(assigned)}
