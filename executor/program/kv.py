"""The KV memory of a process's layers, and which layers the compiled attention takes."""

from __future__ import annotations

import torch

from quintet.executor.cards.share import Share
from quintet.executor.layers.attention import AttentionLayer
from quintet.executor.memory import lazy_zeros
from quintet.executor.program.library import ProgramLibrary
from quintet.executor.program.recorder import KvMemory
from quintet.wire.kv_spec import KvSpec


def takes_layer(library: ProgramLibrary, layer: AttentionLayer, code: int, block_size: int) -> bool:
    """Whether the kernels compute such a layer over a cache of such numbers."""
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    return bool(library.kv_block_bytes(code, *heads, block_size, layer.values_in_keys))


def allocate_kv(spec: KvSpec, num_blocks: int, code: int, share: Share) -> KvMemory:
    """Reserve the KV memory of the layers that this process has. Pages are mapped when first written.

    code: of the numbers stored. A place that only layers of other stages have is empty.
    """
    used = spec.places_of(share.has_layer)
    widths = (spec.layer_bytes if place in used else 0 for place in range(spec.layers_per_block))
    places = (lazy_zeros((num_blocks, width), torch.uint8, torch.device("cpu")) for width in widths)
    return KvMemory(spec, tuple(places), code)
