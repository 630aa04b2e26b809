"""Times calls on a device: by its own events on a GPU, by the processor's clock on a CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch


def seconds(device: torch.device, call: Callable[[], object], repeats: int, warm_up: int = 3) -> list[float]:
    """Return the time of each of ``repeats`` calls, after ``warm_up`` that do not count.

    On a GPU nothing waits between the calls, so that the device never idles for the host where a call takes it longer than
    the host takes to launch it.
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
