"""Sampler operations and logits processors on a device; kernels replace the torch versions if available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.draw import DeviceDraw
from quintet.executor.backends.cuda.ops.entries import DeviceReport
from quintet.executor.backends.cuda.ops.penalties import DevicePenalties
from quintet.executor.sampling.logits_processor import LogitsProcessor
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.sampler import SHAPING


def sampling_ops(device: Device, ops: SamplingOps) -> SamplingOps:
    """Return ``ops`` with the device's draw and log-probability kernels."""
    return replace(ops, draw=DeviceDraw(device), entries=DeviceReport(device))


def shaping_on(device: Device) -> tuple[Callable[[int, int], LogitsProcessor], ...]:
    """Return `SHAPING` in order, with the device's penalties kernel."""

    def penalties(max_num_seqs: int, _vocab_size: int) -> LogitsProcessor:
        return DevicePenalties(device, max_num_seqs)

    return tuple(penalties if make is Penalties else make for make in SHAPING)
