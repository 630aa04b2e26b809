"""KV memory of a process's layers, and the check that the compiled attention supports a layer."""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import KvPlace
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.kv_memory import KvMemory
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.kv_spec import KvSpec


def kv_place(kv: KvMemory, layer: int, *, state: bool = False) -> KvPlace:
    """Return the location of a layer's keys and values, or of its recurrent state."""
    if state and kv.states is not None:
        kv = kv.states
    group, place = kv.spec.place(layer, state=state)
    drafts = kv.draft_block(group) if state else 0
    address, stripe = kv.places[place].data_ptr(), kv.stripe
    return KvPlace(address, kv.spec.layer_bytes, group, stripe.size, stripe.index, drafts)


def takes_layer(library: ProgramLibrary, layer: AttentionLayer, code: int, block_size: int) -> bool:
    """Return whether the kernels support the layer with a KV cache of this dtype code."""
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    return bool(library.kv_block_bytes(code, *heads, block_size, layer.values_in_keys))


def share_kv(spec: KvSpec, num_blocks: int, dtype: torch.dtype, ranks: Ranks) -> KvMemory:
    """Map the KV memory that ranks share. A place that only layers of other stages use is empty."""
    share, used = ranks.share, spec.places_of(ranks.share.has_layer)
    memory = ranks.kv_blocks(spec.layer_bytes).view(spec.layers_per_block, num_blocks, spec.layer_bytes)
    places = [memory[place][:, : spec.layer_bytes * (place in used)] for place in range(len(memory))]
    return KvMemory(spec, places, dtype, share.stripe)
