"""KV memory of a process's layers, and the check that the compiled attention supports a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import KvPlace
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.share import ALONE, BlockStripe, Share
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.kv_spec import KvSpec


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV memory of all layers."""

    spec: KvSpec
    places: tuple[torch.Tensor, ...]
    """One uint8 ``[num_blocks, layer_bytes]`` per layer of a block; the inner layout is private to the kernels."""
    dtype: int
    """Code of the stored dtype."""
    stripe: BlockStripe = ALONE
    """Blocks that this process writes when ranks share the memory (context parallelism)."""

    def place(self, layer: int, *, state: bool = False) -> KvPlace:
        """Return the location of a layer's keys and values, or of its recurrent state."""
        group, place = self.spec.place(layer, state=state)
        memory, stripe = self.places[place].data_ptr(), self.stripe
        return KvPlace(memory, self.spec.layer_bytes, group, stripe.size, stripe.index)


def takes_layer(library: ProgramLibrary, layer: AttentionLayer, code: int, block_size: int) -> bool:
    """Return whether the kernels support the layer with a KV cache of this dtype code."""
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    return bool(library.kv_block_bytes(code, *heads, block_size, layer.values_in_keys))


def allocate_kv(
    spec: KvSpec, num_blocks: int, code: int, share: Share, ranks: Ranks | None = None
) -> KvMemory:
    """Reserve the KV memory of this process's layers, or map the memory that ranks share.

    The kernel maps a page on its first write. code: of the stored dtype. A place that only layers of other stages use is empty.
    """
    used = spec.places_of(share.has_layer)
    if ranks is not None and not share.stripe.is_alone:
        memory = ranks.kv_blocks(spec.layer_bytes).view(spec.layers_per_block, num_blocks, spec.layer_bytes)
        places = tuple(memory[place][:, : spec.layer_bytes * (place in used)] for place in range(len(memory)))
        return KvMemory(spec, places, code, share.stripe)
    widths = (spec.layer_bytes if place in used else 0 for place in range(spec.layers_per_block))
    own = (lazy_zeros((num_blocks, width), torch.uint8, torch.device("cpu")) for width in widths)
    return KvMemory(spec, tuple(own), code)
