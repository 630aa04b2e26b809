"""What a request holds of one group of layers: blocks for consecutive positions of its block table.

    position    0     1     2     3     4     5
               behind the window  |    held    |
                                begin         end

Of a group of states the blocks are those that the newest step read and wrote (`quintet.core.recurrent_state`), often
one and the same.
"""

from __future__ import annotations


class GroupBlocks:
    """A run of a block table. Those that see everything begin at 0."""

    __slots__ = ("begin", "blocks")

    def __init__(self, begin: int = 0, blocks: list[int] | None = None) -> None:
        self.begin = begin
        self.blocks: list[int] = [] if blocks is None else blocks

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.begin + len(self.blocks)

    def behind(self, position: int) -> list[int]:
        """Return the blocks before a position."""
        return self.blocks[: max(0, position - self.begin)]

    def drop(self, position: int) -> None:
        """Forget the blocks before a position, as `behind` names them; where it is past the end, begin there."""
        del self.blocks[: max(0, position - self.begin)]
        self.begin = max(self.begin, position)
