"""KV memory layout of a model, in plain numbers for the core.

Layers with equal needs share a *group* and its block table. All groups allocate blocks from one pool. A block is
``layers_per_block`` *places* of ``layer_bytes`` each and belongs to one group at a time; its places are used in layer
order:

    block 7, held by group 0     | layer 5 | layer 11 |  (free)  |
    block 8, held by group 1     | layer 0 | layer 1  | layer 2  |
                                   place 0   place 1     place 2

Memory is one tensor per place, ``[num_blocks, layer_bytes]``. With pipeline stages, each stage has the places of its
own layers. Every group has layers in each stage in proportion, so that few places are in several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Kind = Literal["full", "sliding", "chunked", "state"]

ALIGNMENT = 64
"""Places are aligned to cache lines."""

MOST_PADDING, MOST_FULL_PADDING = 0.15, 0.05
"""Maximum unused shares of the places in a grouping: fewer groups mean fewer tables.

The share is lower for full attention, because its memory grows with the request.
"""


class LayerKv(msgspec.Struct, frozen=True):
    """KV memory of one layer per request. A layer with attention and a state has two of them."""

    layer: int
    kind: Kind = "full"
    window: int = 0
    """See `KvGroup.window`."""
    token_bytes: int = 0
    """Keys and values of one token; 0 for a state."""
    state_bytes: int = 0
    """Size of a state, independent of the number of tokens; 0 for other kinds."""


class KvGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers with equal needs that share one block table.

    - ``full``: a token attends to all before it.
    - ``sliding``: to the newest ``window`` tokens, itself included.
    - ``chunked``: to its own chunk of ``window`` tokens.
    - ``state``: a state of fixed size in a block. The table has the block a step reads, at position 0, and the one it
      writes, at 1.
    """

    kind: Kind
    layers: list[int]
    """The model's layer numbers, in the order of their places."""
    window: int = 0

    @property
    def is_state(self) -> bool:
        """True when blocks hold states rather than tokens."""
        return self.kind == "state"

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` attends to; later tokens attend to no earlier one."""
        if self.kind == "sliding":
            return max(0, position + 1 - self.window)
        if self.kind == "chunked":
            return position // self.window * self.window
        return 0

    def used(self, start: int, end: int, block_size: int) -> range:
        """Return the positions of a block table that computing a request's tokens ``[start, end)`` reads or writes."""
        if self.is_state:
            return range(2)
        return range(self.first_seen(start) // block_size, -(-end // block_size))

    def most_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Return the maximum number of blocks that a request of this length holds at once, at ``step_tokens`` per step."""
        if self.is_state:
            return STATE_BLOCKS
        blocks = -(-num_tokens // block_size)
        if self.kind == "full":
            return blocks
        return min(blocks, (self.window + step_tokens - 3) // block_size + 2)


def padded_head(width: int) -> int:
    """Return the padded width of a key or value head: the kernels read 16 elements at a time."""
    return -(-width // 16) * 16


STATE_BLOCKS = 2
"""Maximum blocks of a state group in a running request: the state that it reads, and the one that it writes."""


class KvSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Grouping of the layers, and size of a block."""

    groups: list[KvGroup]
    layers_per_block: int
    layer_bytes: int
    """A layer's share of a block: the largest need of any layer."""
    block_size: int
    """Tokens per block."""
    num_repeated: int = 0
    """Places counted again for each further pipeline stage that has memory for them."""
    draft_bytes: int = 0
    """Memory of a block of the draft model, which has as many blocks, divided by the number of KV memories; 0 without one.

    Only rank 0 of the first stage has the draft model. Counted on each host, since hosts have equal KV memory.
    """

    @property
    def has_states(self) -> bool:
        """True when some layers keep a state per request."""
        return any(group.is_state for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """KV memory of one block, in all stages together, and a part of the draft model's block."""
        return self.offloaded_bytes_per_block + self.draft_bytes

    @property
    def offloaded_bytes_per_block(self) -> int:
        """Bytes of one block outside KV memory: in host memory, on disk, in a store and on the network.

        Keys and values of the draft model are computed again instead.
        """
        return (self.layers_per_block + self.num_repeated) * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """Memory per token of a long request, in groups with full attention."""
        num_full = sum(group.kind == "full" for group in self.groups)
        return num_full * self.bytes_per_block // self.block_size

    def num_blocks(self, memory_bytes: int) -> int:
        """Return the number of blocks that fit into this KV memory."""
        return memory_bytes // self.bytes_per_block

    def num_offloaded_blocks(self, size_bytes: int) -> int:
        """Return the number of blocks that fit into this host memory or disk space."""
        return size_bytes // self.offloaded_bytes_per_block

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum number of blocks that a request of this length holds at once, in all groups."""
        return sum(group.most_blocks(num_tokens, self.block_size, step_tokens) for group in self.groups)

    def longest(self, num_blocks: int, most_tokens: int, step_tokens: int) -> int:
        """Return the length of the longest request that fits into this number of blocks, at most ``most_tokens``."""
        low, high = 0, most_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle, step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def places_of(self, has_layer: Callable[[int], bool]) -> set[int]:
        """Return the places of these layers, in any group."""
        return {
            place for group in self.groups for place, layer in enumerate(group.layers) if has_layer(layer)
        }

    def place(self, layer: int, *, state: bool = False) -> tuple[int, int]:
        """Return group and place of a layer's keys and values, or of its state."""
        for index, group in enumerate(self.groups):
            if group.is_state == state and layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} has no {'state' if state else 'keys and values'}")


def group_layers(
    layers: Sequence[LayerKv], block_size: int, stages: Sequence[tuple[int, int]] = ()
) -> KvSpec:
    """Group a model's layers by kind and window, in groups of a size that leaves few places unused. See `MOST_PADDING`.

    stages: the layer range of each pipeline stage, end exclusive, if there are several.
    """
    alike: dict[tuple[Kind, int], list[int]] = {}
    for layer in layers:
        alike.setdefault((layer.kind, layer.window), []).append(layer.layer)
    counts = [len(members) for members in alike.values()]
    full = [len(members) for (kind, _), members in alike.items() if kind == "full"]
    layers_per_block = max(
        width
        for width in range(1, max(counts) + 1)
        if _padded(counts, width) <= (1 + MOST_PADDING) * len(layers)
        and _padded(full, width) <= (1 + MOST_FULL_PADDING) * sum(full)
    )
    groups: list[KvGroup] = []
    for (kind, window), members in alike.items():
        num_groups = -(-len(members) // layers_per_block)
        groups += [KvGroup(kind, members[i::num_groups], window) for i in range(num_groups)]
    needed = max(layer.token_bytes * block_size + layer.state_bytes for layer in layers)
    spec = KvSpec(groups, layers_per_block, -(-needed // ALIGNMENT) * ALIGNMENT, block_size)
    if not stages:
        return spec
    num_places = sum(len(spec.places_of(range(*stage).__contains__)) for stage in stages)
    return msgspec.structs.replace(spec, num_repeated=num_places - layers_per_block)


def _padded(counts: list[int], width: int) -> int:
    """Return the number of places that layers of each kind take in groups of this width."""
    return sum(-(-count // width) * width for count in counts)


def full_layers(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, block_size: int
) -> KvSpec:
    """Return the single group of a model with full attention and equal heads in all layers."""
    token_bytes = 2 * num_kv_heads * padded_head(head_dim) * dtype_bytes
    return group_layers([LayerKv(layer, "full", 0, token_bytes) for layer in range(num_layers)], block_size)
