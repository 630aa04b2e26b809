"""KV offload to pinned host memory, with the copies of a plan.

The CUDA counterpart of `quintet.executor.kv_transfer.features.kv_offload`: one launch copies all layers, without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks

TRIAL_BYTES = 64 << 20
"""Bytes copied in each direction to measure bandwidth; large enough to make the launch overhead negligible."""


class HostPool:
    """Pinned host memory for KV blocks; kernels access it directly."""

    def __init__(self, device: Device, blocks: BlockPool, num_blocks: int) -> None:
        """blocks: KV blocks of the device; num_blocks: number of host blocks, at least 1."""
        shape = (num_blocks, blocks.block_bytes)
        self.num_blocks = num_blocks
        self._device = device
        self._blocks = blocks
        self._host = BlockPool.of(device, [device.pinned(shape, torch.uint8) for _ in blocks.places])

    def copy_out(self, pairs: torch.Tensor) -> None:
        """Copy blocks to the host; pairs: int32[2 * n] on the device, ``device block, host block``."""
        copy_blocks(self._device, self._blocks, self._host, pairs.view(-1, 2))

    def copy_in(self, pairs: torch.Tensor) -> None:
        """Copy blocks from the host; pairs: int32[2 * n] on the device, ``host block, device block``."""
        copy_blocks(self._device, self._host, self._blocks, pairs.view(-1, 2))

    def measure(self) -> int:
        """Return the bandwidth of the slower copy direction in bytes per second. Leaves KV memory unchanged."""
        block_bytes = self._blocks.block_bytes * len(self._blocks.places)
        num = min(self.num_blocks, self._blocks.num_blocks, -(-TRIAL_BYTES // block_bytes))
        same = torch.arange(num, dtype=torch.int32, device=self._device.torch_device)
        pairs = torch.stack((same, same), 1).reshape(-1)
        self.copy_out(pairs)  # warm up
        milliseconds = max(self._time(self.copy_out, pairs), self._time(self.copy_in, pairs))
        return max(1, int(num * block_bytes / milliseconds * 1e3))

    def _time(self, copy: Callable[[torch.Tensor], None], pairs: torch.Tensor) -> float:
        begin = self._device.record()
        copy(pairs)
        end = self._device.record()
        end.wait()
        return end.elapsed_ms(begin)
