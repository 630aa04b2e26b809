"""What a model's layers need of KV memory, as plain numbers the core can count with.

Layers that need the same share a *group*, and with it one block table of each request. All groups take their blocks from
one pool: a block is ``layers_per_block`` *places* of ``layer_bytes`` each, and belongs to one group at a time, whose first
layer has the first place, and so on. ::

    block 7, held by group 0     | layer 5 | layer 11 |  (free)  |
    block 8, held by group 1     | layer 0 | layer 1  | layer 2  |
                                   place 0   place 1     place 2

Memory is one tensor per place, ``[num_blocks, layer_bytes]``. Of a model in stages each has the places of its own layers: every
group has some in each stage, about as many as its share of the layers, so that few places are in several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Kind = Literal["full", "sliding", "chunked", "state"]

ALIGNMENT = 64
"""Places begin at multiples of a cache line."""

MOST_PADDING, MOST_FULL_PADDING = 0.15, 0.05
"""Layers are grouped by as many as leave at most these shares of the places unused: fewer groups are fewer tables to keep. Of
those that see everything fewer, since what they need grows with a request."""


class LayerKv(msgspec.Struct, frozen=True):
    """What one layer keeps of each request. A layer with attention and a state is two of them."""

    layer: int
    kind: Kind = "full"
    window: int = 0
    """See `KvGroup.window`."""
    token_bytes: int = 0
    """Keys and values of one token; of a state 0."""
    state_bytes: int = 0
    """A state's size, whatever the number of tokens; of all other kinds 0."""


class KvGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers that need the same, and share one block table.

    ``full``: a token sees all before it. ``sliding``: the newest ``window`` tokens, itself included. ``chunked``: those of
    its own chunk of ``window`` tokens. ``state``: nothing but a state of fixed size, which lies in a block of its own; the
    table names which one a step reads, at position 0, and which one it writes, at position 1.
    """

    kind: Kind
    layers: list[int]
    """The model's numbers of the layers, in the order of their places."""
    window: int = 0

    @property
    def is_state(self) -> bool:
        """Whether blocks hold states rather than tokens."""
        return self.kind == "state"

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` sees; those behind it see no earlier one."""
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
        """Return the most blocks that a request of this length ever holds at once, computed by so many tokens a step."""
        if self.is_state:
            return STATE_BLOCKS
        blocks = -(-num_tokens // block_size)
        if self.kind == "full":
            return blocks
        return min(blocks, (self.window + step_tokens - 3) // block_size + 2)


def padded_head(width: int) -> int:
    """Return how many numbers a head of ``width`` takes in a key or a value: the kernels read 16 at a time."""
    return -(-width // 16) * 16


STATE_BLOCKS = 2
"""Blocks of a state group that a running request holds at the most: the state that it reads, and the one that it writes."""


class KvSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the layers are grouped, and what a block is."""

    groups: list[KvGroup]
    layers_per_block: int
    layer_bytes: int
    """A layer's share of a block: what the layer needs that needs most."""
    block_size: int
    """Tokens whose keys and values a block holds."""
    num_repeated: int = 0
    """Places beyond ``layers_per_block``: of a model in stages one that several stages have is memory in each."""

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of each request."""
        return any(group.is_state for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block, in all stages together."""
        return (self.layers_per_block + self.num_repeated) * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """What a token of a long request takes for as long as it runs: groups that see everything."""
        num_full = sum(group.kind == "full" for group in self.groups)
        return num_full * self.bytes_per_block // self.block_size

    def num_blocks(self, memory_bytes: int) -> int:
        """How many blocks fit into this much memory."""
        return memory_bytes // self.bytes_per_block

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a request of this length ever holds at once, in all groups."""
        return sum(group.most_blocks(num_tokens, self.block_size, step_tokens) for group in self.groups)

    def longest(self, num_blocks: int, most_tokens: int, step_tokens: int) -> int:
        """Return the length of the longest request that so many blocks are enough for, at most ``most_tokens``."""
        low, high = 0, most_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle, step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def places_of(self, has_layer: Callable[[int], bool]) -> set[int]:
        """Return the places that these layers have, of any group."""
        return {
            place for group in self.groups for place, layer in enumerate(group.layers) if has_layer(layer)
        }

    def place(self, layer: int, *, state: bool = False) -> tuple[int, int]:
        """Return the group and the place of a layer: of its keys and values, or of its state."""
        for index, group in enumerate(self.groups):
            if group.is_state == state and layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} keeps no {'state' if state else 'keys and values'}")


def group_layers(
    layers: Sequence[LayerKv], block_size: int, stages: Sequence[tuple[int, int]] = ()
) -> KvSpec:
    """Group the layers of a model: alike ones together, as evenly as leaves few places unused. See `MOST_PADDING`.

    stages: which layers each has, from the first to behind the last, where there are several.
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
    """Return the places that so many layers of each kind take in groups of this width."""
    return sum(-(-count // width) * width for count in counts)


def full_layers(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, block_size: int
) -> KvSpec:
    """Return the one group of a model whose layers all see everything and have the same heads."""
    token_bytes = 2 * num_kv_heads * padded_head(head_dim) * dtype_bytes
    return group_layers([LayerKv(layer, "full", 0, token_bytes) for layer in range(num_layers)], block_size)
