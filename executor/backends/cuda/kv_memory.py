"""Size and tensors of the KV cache on a device.

The size is measured rather than estimated: the model is loaded and its largest step runs first. The memory free after that is
available, except for an upper bound of the memory of graphs.
"""

from __future__ import annotations

import math

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

GRAPH_BYTES = 256 << 20
"""Memory of captured graphs besides tensors: nodes, and cuBLAS's workspace."""

LIVE_WIDTHS = 8
"""Upper bound of a decode step's live tensors, in units of the widest one."""


def graph_bytes(
    max_num_seqs: int, vocab_size: int, widest: int, element_bytes: int, logits_item_bytes: int
) -> int:
    """Return an upper bound of the memory of all graphs: the pool of the largest, which the others share, and its logits.

    widest: width of the widest value except the logits, with ``element_bytes`` per element.
    """
    logits = 2 * vocab_size * logits_item_bytes
    return GRAPH_BYTES + max_num_seqs * (logits + LIVE_WIDTHS * widest * element_bytes)


def kv_bytes(total_bytes: int, free_bytes: int, utilization: float, reserved_bytes: int) -> int:
    """Return the memory for the KV cache if the device may be used up to the fraction ``utilization``.

    free_bytes: after the model was loaded and its largest step ran; the used memory includes other processes. reserved_bytes:
    for graphs, which are captured later.
    """
    used = total_bytes - free_bytes
    return int(total_bytes * utilization) - used - reserved_bytes


def num_kv_blocks(config: EngineConfig, device: Device, reserved_bytes: int) -> int:
    """Return the number of KV blocks; raise `ConfigError` if a request of the maximum length does not fit."""
    kv, cache, max_model_len = config.model.kv, config.cache, config.model.max_model_len
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


class DeviceKv:
    """KV memory: one uint8 tensor per place of a block, see `quintet.wire.kv_spec`. Initialised to zeros."""

    def __init__(self, spec: KvSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        shape = (num_blocks, spec.layer_bytes)
        self.places = [
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(spec.layers_per_block)
        ]
        self._of_layer: dict[int, tuple[int, Planes]] = {}

    def of_layer(self, layer: AttentionLayer) -> tuple[int, Planes]:
        """Return the layer's group, and its keys and values, each ``[num_blocks, num_kv_heads, block_size, width]``."""
        planes = self._of_layer.get(layer.index)
        if planes is None:
            planes = self._of_layer[layer.index] = self._planes(layer)
        return planes

    def _planes(self, layer: AttentionLayer) -> tuple[int, Planes]:
        group, place = self.spec.place(layer.index)
        keys, end = self._plane(place, 0, layer.num_kv_heads, layer.head_dim)
        if layer.values_in_keys:
            return group, (keys, keys[..., : layer.value_width])
        values, _ = self._plane(place, end, layer.num_kv_heads, layer.value_width)
        return group, (keys, values)

    def _plane(self, place: int, begin: int, num_heads: int, width: int) -> tuple[torch.Tensor, int]:
        """Return the keys or values at this byte offset of a block, and their end offset."""
        shape = (num_heads, self.spec.block_size, width)
        end = begin + math.prod(shape) * self.dtype.itemsize
        return self.places[place][:, begin:end].view(self.dtype).unflatten(1, shape), end


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
