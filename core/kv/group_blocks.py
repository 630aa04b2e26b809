"""Blocks of a request in one group of layers, for consecutive positions of its block table.

    position    0     1     2     3     4     5
               before the window  |    held    |
                                begin         end

A state group has the blocks that the newest step read and wrote (`quintet.core.recurrent_state`), often the same one.
"""

from __future__ import annotations


class GroupBlocks:
    """A range of a block table. Without a window it begins at 0."""

    __slots__ = ("begin", "blocks")

    def __init__(self, begin: int = 0, blocks: list[int] | None = None) -> None:
        self.begin = begin
        self.blocks: list[int] = [] if blocks is None else blocks

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
