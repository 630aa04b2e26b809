"""Size of the KV cache on a device, and offload to pinned host memory.

The size is measured rather than estimated: the model is loaded and its largest step runs first. The memory free after
that is available, except for an upper bound of the memory of graphs.

`HostPool` is the CUDA counterpart of `quintet.executor.kv_transfer.host_blocks`: one launch copies all
layers, without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

GRAPH_BYTES = 256 << 20
"""Memory of captured graphs besides tensors: nodes, and cuBLAS's workspace."""

LIVE_WIDTHS = 8
"""Upper bound of a decode step's live tensors, in units of the widest one."""


def graph_bytes(
    max_tokens: int, vocab_size: int, widest: int, element_bytes: int, logits_item_bytes: int
) -> int:
    """Return an upper bound of the memory of all graphs: the pool of the largest, which the others share, and its logits.

    max_tokens: of the largest graph, each followed by a draw.
    widest: width of the widest value except the logits, with ``element_bytes`` per element.
    """
    logits = 2 * vocab_size * logits_item_bytes
    return GRAPH_BYTES + max_tokens * (logits + LIVE_WIDTHS * widest * element_bytes)


def kv_bytes(total_bytes: int, free_bytes: int, utilization: float, reserved_bytes: int) -> int:
    """Return the memory for the KV cache if the device may be used up to the fraction ``utilization``.

    free_bytes: after the model was loaded and its largest step ran; the used memory includes other processes. reserved_bytes:
    for graphs, which are captured later.
    """
    used = total_bytes - free_bytes
    return int(total_bytes * utilization) - used - reserved_bytes


def num_kv_blocks(config: EngineConfig, device: Device, reserved_bytes: int, draft_bytes: int = 0) -> int:
    """Return the number of KV blocks; raise `ConfigError` if a request of the maximum length does not fit.

    draft_bytes: of this rank's draft model, for each block.
    """
    cache, max_model_len = config.cache, config.model.max_model_len
    kv = msgspec.structs.replace(config.model.kv, draft_bytes=draft_bytes)
    total, free = device.total_bytes(), device.free_bytes()
    step_tokens = config.scheduler.max_num_batched_tokens
    most = config.scheduler.max_num_seqs * kv.most_blocks(max_model_len, step_tokens) + 1
    if cache.memory_bytes:
        memory_bytes, flag = cache.memory_bytes, "--kv-cache-memory"
        if memory_bytes > free:
            raise ConfigError(
                f"--kv-cache-memory is {memory_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of GPU memory are free after"
                " loading the model: lower it, or remove it to use --gpu-memory-utilization"
            )
    else:
        flag = "--gpu-memory-utilization"
        memory_bytes = kv_bytes(total, free, cache.gpu_memory_utilization, reserved_bytes)
    num_blocks = min(max(0, kv.num_blocks(memory_bytes)), most)
    longest = kv.longest(num_blocks, max_model_len, step_tokens)
    if longest < max_model_len:
        needed = kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
        raise ConfigError(
            f"one request of {max_model_len} tokens needs {_gib(needed)} of KV memory, but only"
            f" {_gib(max(0, memory_bytes))} of the GPU's {_gib(total)} are left ({_gib(total - free)} are in use):"
            f" lower --max-model-len to {longest}, raise {flag}, or stop other processes on the GPU"
        )
    return num_blocks


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


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
