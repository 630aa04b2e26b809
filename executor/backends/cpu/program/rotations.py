"""RoPE cosines and sines in the layout that a program reads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from quintet.executor.backends.cpu.program.step import CRotation
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.rope import Rope
from quintet.executor.ragged import ranges
from quintet.executor.slots import Rows, SlotTables

FIRST_ROTATIONS = 4096
"""Number of positions computed at startup."""


class Rotations:
    """Cosines and sines of a model's RoPE layers.

    A table is indexed by position, and grown on demand; or by token, if its values depend on more than the position.
    """

    def __init__(
        self, ropes: Sequence[Rope], dtype: torch.dtype, max_positions: int, ranks: Ranks | None = None
    ) -> None:
        self._descriptors = (CRotation * max(1, len(ropes)))()
        tables = [_Table(*each, dtype) for each in zip(ropes, self._descriptors, strict=False)]
        self._by_position = [each for each in tables if not each.rope.spec.depends_on_length]
        self._by_token = [each for each in tables if each.rope.spec.depends_on_length]
        self._max_positions = max_positions
        self._ranks = ranks if self._by_token else None
        if ranks is not None:
            begin = 0
            for table in self._by_token:
                table.share(*(ranks.rotated(begin + i * table.width, table.width, dtype) for i in range(2)))
                begin += 2 * table.width
        self.num_ready = 0 if self._by_token else sys.maxsize
        """Positions for which `fill` has nothing to do; 0 if some values depend on more than the position."""
        self._num_positions = 0
        if self._by_position:
            self._grow(min(FIRST_ROTATIONS, max_positions))

    @property
    def address(self) -> int:
        """Address of the C descriptors; valid while this object lives."""
        return ctypes.addressof(self._descriptors)

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """Point the descriptors at the rotations of every token of ``rows``. length: the largest position plus 1."""
        if self._ranks is not None:
            self._ranks.wait_for_all()  # other ranks may still read those of the last step
        if self._by_token:
            owners, positions = ranges(rows.starts, rows.counts)
            prompts = tables.num_prompt_tokens[rows.slots[owners]]
            for table in self._by_token:
                table.compute(torch.from_numpy(positions), torch.from_numpy(prompts))
        self.reach(length)

    @property
    def handed_width(self) -> int:
        """Elements per token to send to the next stage: cosines and sines that depend on more than the position."""
        return sum(2 * table.width for table in self._by_token)

    def write_handover(self, rows: torch.Tensor) -> None:
        """Write the current step's values into rows ``[num_tokens, handed_width]`` for the next stage."""
        for table, part in zip(self._by_token, self._parts(rows), strict=True):
            torch.cat((table.cosines, table.sines), dim=1, out=part)

    def take(self, rows: torch.Tensor) -> None:
        """Use the values that the previous stage sent, instead of `fill`. No rank reads the last step's any more."""
        for table, part in zip(self._by_token, self._parts(rows), strict=True):
            # The link reuses the memory of the rows after this step.
            halves = part.chunk(2, dim=1)
            table.point_to(*(each.clone(memory_format=torch.contiguous_format) for each in halves))

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return list(rows.split([2 * table.width for table in self._by_token], dim=1))

    def reach(self, length: int) -> None:
        """Extend position-only tables to ``length`` positions; a rank other than 0 knows only the length of a step."""
        if self._by_position and length > self._num_positions:
            self._grow(min(max(length, 2 * self._num_positions), self._max_positions))

    def _grow(self, num_positions: int) -> None:
        for table in self._by_position:
            table.compute(torch.arange(num_positions), None)
        self._num_positions = num_positions
        self.num_ready = 0 if self._by_token else num_positions


class _Table:
    """Cosines and sines of one RoPE, ``[rows, rotary_dim]`` each."""

    def __init__(self, rope: Rope, descriptor: CRotation, dtype: torch.dtype) -> None:
        self.rope, self.width = rope, rope.spec.rotary_dim
        self._descriptor = descriptor
        self._dtype = dtype
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        descriptor.by_token = rope.spec.depends_on_length

    def share(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Use shared memory, ``[max_tokens, rotary_dim]`` each; rank 0 fills it."""
        self._shared = cosines, sines
        self._descriptor.cosines, self._descriptor.sines = cosines.data_ptr(), sines.data_ptr()

    def compute(self, positions: torch.Tensor, prompts: torch.Tensor | None) -> None:
        """Compute the rows; see `Rope.cos_sin`."""
        cosines, sines = self.rope.cos_sin(positions, prompts, self._dtype)
        self.point_to(cosines.flatten(1), sines.flatten(1))

    def point_to(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Point the descriptor at the rows, or copy them to shared memory."""
        self.cosines, self.sines = cosines, sines
        if self._shared is None:
            self._descriptor.cosines, self._descriptor.sines = cosines.data_ptr(), sines.data_ptr()
            return
        for place, numbers in zip(self._shared, (cosines, sines), strict=True):
            place[: len(numbers)].copy_(numbers)
