"""KV offload (swap space), the executor's half: host memory for blocks, and the copies that plans request.

Uses torch on any device. The core decides on the content of host blocks (`quintet.core.kv.swap_pool`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.share import ALONE, BlockStripe

TRIAL_BYTES = 64 << 20
"""Bytes copied to measure the rate: enough to make the start-up cost of a copy negligible."""

NUM_TRIALS = 3
"""Number of measurements; the best counts, to exclude temporary load of the machine at start."""


class HostBlocks:
    """Host memory for blocks of a runner's KV memory."""

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int, stripe: BlockStripe = ALONE) -> None:
        """``layers``: KV memory of each layer, ``[blocks, ...]``, of any format; views are allowed.

        stripe: this process's stripe of blocks, if several processes share the KV memory.
        """
        self.num_blocks = num_blocks
        self._turn = stripe
        self._layers = [layer.view(torch.uint8) for layer in layers] if num_blocks else []
        own = -(-num_blocks // self._turn.size)
        self._host = [_host_memory(own, layer) for layer in self._layers]

    def copy_out(self, pairs: bytes) -> None:
        """Copy from device blocks to host blocks; see `StepPlan.swaps_out`."""
        on_device, on_host = self._columns(pairs)
        for layer, host in zip(self._layers, self._host, strict=True):
            host[on_host] = layer[on_device.to(layer.device)].cpu()

    def copy_in(self, pairs: bytes) -> None:
        """Copy from host blocks to device blocks; see `StepPlan.swaps_in`."""
        on_device, on_host = self._columns(pairs)
        for layer, host in zip(self._layers, self._host, strict=True):
            layer[on_device.to(layer.device)] = host[on_host].to(layer.device)

    def measure(self) -> int:
        """Return the copy rate in bytes per second, the slower direction; 0 without host blocks. KV memory is unchanged."""
        if not self._layers:
            return 0
        block_bytes = sum(layer[0].numel() for layer in self._layers)
        stripe = self._turn
        most = min(self.num_blocks, len(self._layers[0]), -(-TRIAL_BYTES // block_bytes) * stripe.size)
        same = np.arange(stripe.index, most, stripe.size, dtype=np.int32)
        num = len(same)
        pairs = np.stack((same, same), 1).tobytes()
        ways = (self.copy_out, self.copy_in)
        for copy in ways:
            copy(pairs)  # the first time, pages are mapped
        seconds = max(min(self._time(copy, pairs) for _ in range(NUM_TRIALS)) for copy in ways)
        return max(1, int(num * block_bytes / seconds))

    def _columns(self, pairs: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the device blocks and local host rows of the pairs in this process's stripe."""
        stripe, columns = self._turn, np.frombuffer(pairs, np.int32).reshape(-1, 2).T.astype(np.int64)
        on_device, on_host = columns[:, columns[1] % stripe.size == stripe.index]
        return torch.from_numpy(on_device), torch.from_numpy(on_host // stripe.size)

    def _time(self, copy: Callable[[bytes], None], pairs: bytes) -> float:
        device = self._layers[0].device
        begun = time.perf_counter()
        copy(pairs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun


def _host_memory(num_blocks: int, layer: torch.Tensor) -> torch.Tensor:
    shape = (num_blocks, *layer.shape[1:])
    if layer.device.type == "cpu":
        return lazy_zeros(shape, torch.uint8, layer.device)
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
