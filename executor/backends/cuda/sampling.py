"""The sampler's operations and logits processors with the device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.draw import draw_on_device
from quintet.executor.backends.cuda.ops.entries import entries_on_device
from quintet.executor.backends.cuda.ops.penalties import DevicePenalties
from quintet.executor.sampling.logits_processor import LogitsProcessor
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.sampler import SHAPING


def sampling_ops(device: Device) -> SamplingOps:
    """Return the device's draw and log-probability kernels."""
    return SamplingOps(partial(draw_on_device, device), partial(entries_on_device, device))


def shaping_on(device: Device) -> tuple[Callable[[int], LogitsProcessor], ...]:
    """Return `SHAPING` in order, with the device's penalties kernel."""

    def penalties(max_num_seqs: int) -> LogitsProcessor:
        return DevicePenalties(device, max_num_seqs)

    return tuple(penalties if make is Penalties else make for make in SHAPING)
