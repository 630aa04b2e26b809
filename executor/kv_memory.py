"""KV memory of a process: one tensor per place of a block, see `quintet.wire.kv_spec`. All models of a worker share it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.memory import lazy_zeros, to_device
from quintet.executor.model_config.share import ALONE, WHOLE, BlockStripe, Share
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.states import StatePart
from quintet.wire.kv_spec import KvSpec

Planes = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, each ``[num_blocks, num_kv_heads, block_size, width]``."""


class KvMemory:
    """KV memory of this process's layers, initially zeros."""

    def __init__(
        self,
        spec: KvSpec,
        places: Sequence[torch.Tensor],
        dtype: torch.dtype,
        stripe: BlockStripe = ALONE,
        num_draft_states: int = 0,
    ) -> None:
        """places: uint8 ``[num_blocks, layer_bytes]``; empty ones are of layers of other stages. dtype: of keys and values.

        stripe: blocks that this process writes, if ranks share the memory (context parallelism). num_draft_states: of each
        state group, in the last blocks (`quintet.executor.speculation.draft_states`).
        """
        self.states: KvMemory | None = None
        """Recurrent states of a draft model. Those of a served model are in ``places``."""
        self.num_draft_states = num_draft_states
        self.spec, self.places, self.dtype, self.stripe = spec, places, dtype, stripe
        self._of_layer: dict[int, tuple[int, Planes]] = {}

    @staticmethod
    def reserve(
        spec: KvSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
        num_draft_states: int = 0,
    ) -> KvMemory:
        """Reserve the memory of the share's layers. On a CPU, the kernel maps a page on its first write."""
        num_blocks += num_draft_states * sum(group.is_state for group in spec.groups)
        used = spec.places_of(share.has_layer)
        widths = (spec.layer_bytes if place in used else 0 for place in range(spec.layers_per_block))
        places = [lazy_zeros((num_blocks, width), torch.uint8, device) for width in widths]
        return KvMemory(spec, places, dtype, num_draft_states=num_draft_states)

    @property
    def blocks(self) -> list[torch.Tensor]:
        """The places that this process has, uint8 ``[num_blocks, layer_bytes]``."""
        return [place for place in self.places if place.shape[1]]

    def of_layer(self, layer: AttentionLayer) -> tuple[int, Planes]:
        """Return the layer's group, and its keys and values in the layout of torch's and CUDA's attention."""
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

    def of_state(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[int, torch.Tensor]:
        """Return the group of a layer's states, and a part of them, ``[num_blocks, *part.shape]``."""
        group, place = self.spec.place(part.index, state=True)
        return group, part.of(self.places[place], dtype)

    def draft_block(self, group: int) -> int:
        """Return the first block with a draft state of a state group."""
        num_groups = sum(each.is_state for each in self.spec.groups[group:])
        return len(self.places[0]) - num_groups * self.num_draft_states

    def copy(self, pairs: bytes) -> None:
        """Copy whole blocks in every layer; see `quintet.wire.step.StepPlan.copies`. No block is source and target."""
        columns = np.frombuffer(pairs, np.int32).reshape(-1, 2).astype(np.int64)
        own = columns[columns[:, 1] % self.stripe.size == self.stripe.index].T.copy()
        device = self.places[0].device
        if device.type == "cpu":  # in one pass over the memory, without the fixed cost of indexing
            for memory in (place.numpy() for place in self.blocks):
                for source, target in own.T.tolist():
                    memory[target] = memory[source]
            return
        sources, targets = to_device(own, device)
        for place in self.places:
            place[targets] = place[sources]
