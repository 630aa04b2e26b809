"""How much of a device's memory keys and values get, and their tensors.

Nothing is guessed that can be tried: the model is loaded and its largest step computed first, so that what is free then
is free for good, but for the graphs, whose memory is bounded here.
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
"""For what captured graphs take besides tensors: their nodes, and cuBLAS's workspace."""

LIVE_WIDTHS = 8
"""A decode step's tensors are never more than this many of the widest one."""


def graph_bytes(
    max_num_seqs: int, vocab_size: int, widest: int, element_bytes: int, logits_item_bytes: int
) -> int:
    """Return a bound for the memory of all graphs: that of the largest, whose pool the others share, and its logits' copy.

    widest: numbers per row of the widest value but the logits, of ``element_bytes`` each.
    """
    logits = 2 * vocab_size * logits_item_bytes
    return GRAPH_BYTES + max_num_seqs * (logits + LIVE_WIDTHS * widest * element_bytes)


def kv_bytes(total_bytes: int, free_bytes: int, utilization: float, reserved_bytes: int) -> int:
    """Return what is left for KV when everything on the device is to take at most ``utilization`` of its memory.

    free_bytes: after the model was loaded and its largest step computed; whoever holds the rest, other processes included,
    is counted against the share. reserved_bytes: for graphs, which are captured later.
    """
    taken = total_bytes - free_bytes
    return int(total_bytes * utilization) - taken - reserved_bytes


def num_kv_blocks(config: EngineConfig, device: Device, reserved_bytes: int) -> int:
    """Return how many blocks of KV the device will hold; raise `ConfigError` when one request might not fit."""
    kv, cache, max_model_len = config.model.kv, config.cache, config.model.max_model_len
    total, free = device.total_bytes(), device.free_bytes()
    step_tokens = config.scheduler.max_num_batched_tokens
    most = config.scheduler.max_num_seqs * kv.most_blocks(max_model_len, step_tokens) + 1
    if cache.memory_bytes:
        memory_bytes, wish = cache.memory_bytes, "--kv-cache-memory"
        if memory_bytes > free:
            raise ConfigError(
                f"--kv-cache-memory is {memory_bytes / 2**30:.1f} GiB, and the GPU has {free / 2**30:.1f} GiB free beside the"
                f" model: give at most that, or drop it to have --gpu-memory-utilization decide"
            )
    else:
        wish = "--gpu-memory-utilization"
        memory_bytes = kv_bytes(total, free, cache.gpu_memory_utilization, reserved_bytes)
    num_blocks = min(max(0, kv.num_blocks(memory_bytes)), most)
    longest = kv.longest(num_blocks, max_model_len, step_tokens)
    if longest < max_model_len:
        needed = kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
        raise ConfigError(
            f"one request of {max_model_len} tokens needs {_gib(needed)} of KV memory, and"
            f" {_gib(max(0, memory_bytes))} are left of the GPU's {_gib(total)} beside weights and work ({_gib(total - free)}):"
            f" lower --max-model-len to {longest}, raise {wish}, or free the GPU of others"
        )
    return num_blocks


class DeviceKv:
    """KV memory: a tensor of bytes per place of a block, see `quintet.wire.kv_spec`. Zeros."""

    def __init__(self, spec: KvSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        shape = (num_blocks, spec.layer_bytes)
        self.places = [
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(spec.layers_per_block)
        ]
        self._of_layer: dict[int, tuple[int, Planes]] = {}

    def of_layer(self, layer: AttentionLayer) -> tuple[int, Planes]:
        """Return the layer's group, and its keys and values: each ``[num_blocks, num_kv_heads, block_size, width]``."""
        found = self._of_layer.get(layer.index)
        if found is None:
            found = self._of_layer[layer.index] = self._planes(layer)
        return found

    def _planes(self, layer: AttentionLayer) -> tuple[int, Planes]:
        group, place = self.spec.place(layer.index)
        keys, end = self._plane(place, 0, layer.num_kv_heads, layer.head_dim)
        if layer.values_in_keys:
            return group, (keys, keys[..., : layer.value_width])
        values, _ = self._plane(place, end, layer.num_kv_heads, layer.value_width)
        return group, (keys, values)

    def _plane(self, place: int, begin: int, num_heads: int, width: int) -> tuple[torch.Tensor, int]:
        """Return keys or values that begin at this byte of a block, and where they end."""
        shape = (num_heads, self.spec.block_size, width)
        end = begin + math.prod(shape) * self.dtype.itemsize
        return self.places[place][:, begin:end].view(self.dtype).unflatten(1, shape), end


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
