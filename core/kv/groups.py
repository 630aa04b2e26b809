"""Layer groups of a model, classified by the core's handling, and blocks of a request in one group.

The blocks are at consecutive positions of a block table.

    position    0     1     2     3     4     5
               before the window  |    held    |
                                begin         end

A state group has the blocks that the newest step read and wrote (`quintet.core.recurrent_state`), often the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quintet.wire.kv_spec import KvGroup, KvSpec


@dataclass(slots=True)
class Groups:
    """See `quintet.wire.kv_spec`. Groups are named by their index."""

    spec: KvSpec
    step_tokens: int
    """Maximum tokens of a request in one step."""
    tokens: tuple[int, ...] = field(init=False)
    """Groups with keys and values."""
    windowed: tuple[int, ...] = field(init=False)
    """Of these, groups with a window."""
    states: tuple[int, ...] = field(init=False)
    is_plain: bool = field(init=False)
    """True for a single group with full attention."""

    def __post_init__(self) -> None:
        def where(*kinds: str) -> tuple[int, ...]:
            return tuple(index for index, group in enumerate(self.spec.groups) if group.kind in kinds)

        self.tokens = where("full", "sliding", "chunked")
        self.windowed = where("sliding", "chunked")
        self.states = where("state")
        self.is_plain = len(self.spec.groups) == 1 and self.spec.groups[0].kind == "full"

    @property
    def all(self) -> list[KvGroup]:
        return self.spec.groups

    def most_blocks(self, index: int, num_tokens: int) -> int:
        """Return the maximum number of blocks of a group that a request of this length holds at once."""
        return self.all[index].most_blocks(num_tokens, self.spec.block_size, self.step_tokens)

    def first_block(self, index: int, position: int) -> int:
        """Return the first position of a group's block table that a token at ``position`` reads."""
        return self.all[index].first_seen(position) // self.spec.block_size

    def taken_by(self, num_tokens: float) -> float:
        """Return the maximum KV use of a request of this length, in tokens; its length for one plain group."""
        if self.is_plain:
            return num_tokens
        block_size, whole = self.spec.block_size, int(num_tokens)
        return sum(
            block_size * self.most_blocks(index, whole)
            if group.is_state
            else min(num_tokens, block_size * self.most_blocks(index, whole))
            for index, group in enumerate(self.all)
        )


class GroupBlocks(msgspec.Struct):
    """A range of a block table. Without a window it begins at 0."""

    begin: int = 0
    blocks: list[int] = []

    @property
    def end(self) -> int:
        """End position, exclusive."""
        return self.begin + len(self.blocks)

    def before(self, position: int) -> list[int]:
        """Return the blocks before a position."""
        return self.blocks[: max(0, position - self.begin)]

    def drop(self, position: int) -> None:
        """Drop the blocks before a position; past the end, the range becomes empty and begins there."""
        del self.blocks[: max(0, position - self.begin)]
        self.begin = max(self.begin, position)
