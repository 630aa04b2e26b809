"""Host memory for blocks that the device has no room for, and the copies that plans ask for. What
`quintet.executor.kv_transfer.features.kv_offload` is for torch, with one launch for all places and no word to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks

TRIAL_BYTES = 64 << 20
"""What is copied to and fro to see how fast that is: enough that beginning it costs nothing beside it."""


class HostPool:
    """Page-locked room for blocks of a device's KV memory, which kernels read and write where it is."""

    def __init__(self, device: Device, blocks: BlockPool, num_blocks: int) -> None:
        """blocks: the device's; num_blocks: of the host, at least one."""
        shape = (num_blocks, blocks.block_bytes)
        self.num_blocks = num_blocks
        self._device = device
        self._blocks = blocks
        self._host = BlockPool.of(device, [device.pinned(shape, torch.uint8) for _ in blocks.places])

    def copy_out(self, pairs: torch.Tensor) -> None:
        """Copy to the host; pairs: int32[2 * n] on the device, ``device block, host block``."""
        copy_blocks(self._device, self._blocks, self._host, pairs.view(-1, 2))

    def copy_in(self, pairs: torch.Tensor) -> None:
        """Copy from the host; pairs: int32[2 * n] on the device, ``host block, device block``."""
        copy_blocks(self._device, self._host, self._blocks, pairs.view(-1, 2))

    def measure(self) -> int:
        """Return bytes per second of copies, the slower way. Leaves KV memory as it is."""
        block_bytes = self._blocks.block_bytes * len(self._blocks.places)
        num = min(self.num_blocks, self._blocks.num_blocks, -(-TRIAL_BYTES // block_bytes))
        same = torch.arange(num, dtype=torch.int32, device=self._device.torch_device)
        pairs = torch.stack((same, same), 1).reshape(-1)
        self.copy_out(pairs)  # loads what is loaded at first use
        milliseconds = max(self._time(self.copy_out, pairs), self._time(self.copy_in, pairs))
        return max(1, int(num * block_bytes / milliseconds * 1e3))

    def _time(self, copy: Callable[[torch.Tensor], None], pairs: torch.Tensor) -> float:
        begin = self._device.record()
        copy(pairs)
        end = self._device.record()
        end.wait()
        return end.elapsed_ms(begin)
