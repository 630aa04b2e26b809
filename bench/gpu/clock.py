"""Time calls on a device: with CUDA events on a GPU, with `time.perf_counter` on a CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch


def seconds(device: torch.device, call: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
    """Return the seconds of each of ``repeats`` calls, after ``warm_up`` calls.

    On a GPU there is no synchronization between calls, so that the device is never idle if a call takes longer than its launch.
    """
    for _ in range(warm_up):
        call()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(repeats):
            call()
            times.append(time.perf_counter())
        return [later - before for before, later in itertools.pairwise(times)]
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    events = [new_event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(later) / 1e3 for before, later in itertools.pairwise(events)]
