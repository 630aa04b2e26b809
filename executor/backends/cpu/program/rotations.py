"""Cosines and sines by which a step's tokens are rotated, as its program reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quintet.executor.backends.cpu.program.step import CRotation
from quintet.executor.batch import Rows
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.rope import Rope
from quintet.executor.ragged import ranges
from quintet.executor.slots import SlotTables

FIRST_ROTATIONS = 4096
"""Positions whose cosines and sines are computed at boot."""


class Rotations:
    """The rotations of a model, as a step points to them."""

    def __init__(
        self, ropes: Sequence[Rope], dtype: torch.dtype, max_positions: int, ranks: Ranks | None = None
    ) -> None:
        self._described = (CRotation * max(1, len(ropes)))()
        self._rotations: list[_Rotation] = []
        self._ranks, num_shared = None, 0
        for rope, described in zip(ropes, self._described, strict=False):
            shared, width = None, rope.spec.rotary_dim
            if ranks is not None and rope.spec.depends_on_length:
                shared = (
                    ranks.rotated(num_shared, width, dtype),
                    ranks.rotated(num_shared + width, width, dtype),
                )
                num_shared += 2 * width
                self._ranks = ranks
            self._rotations.append(_Rotation(rope, dtype, max_positions, described, shared))

    @property
    def address(self) -> int:
        """Where they are described, for as long as this lives."""
        return ctypes.addressof(self._described)

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """Describe the rotations of every token of ``rows``. length: their largest position plus 1."""
        if self._ranks is not None:
            self._ranks.wait_for_all()  # who still reads those of the last step
        for rotation in self._rotations:
            rotation.fill(length, rows, tables)

    @property
    def handed_width(self) -> int:
        """Numbers of a token that the next stage has to be handed: cosines and sines that depend on more than its position."""
        return sum(rotation.handed_width for rotation in self._rotations)

    def hand_on(self, rows: torch.Tensor) -> None:
        """Write those of the step that was filled, or taken, into rows ``[num_tokens, handed_width]``."""
        for rotation, part in zip(self._rotations, self._parts(rows), strict=True):
            rotation.hand_on(part)

    def take(self, rows: torch.Tensor) -> None:
        """Describe those of the step that the stage before has handed on, instead of `fill`. Nobody reads the last step's."""
        for rotation, part in zip(self._rotations, self._parts(rows), strict=True):
            rotation.take(part)

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return list(rows.split([rotation.handed_width for rotation in self._rotations], dim=1))

    def reach(self, length: int) -> None:
        """Describe those of positions up to ``length``, where nothing else matters: a rank knows no more of a step."""
        for rotation in self._rotations:
            rotation.reach(length)


class _Rotation:
    """Cosines and sines by position, as many as were needed so far; by token where they depend on more than that."""

    def __init__(
        self,
        rope: Rope,
        dtype: torch.dtype,
        max_positions: int,
        described: CRotation,
        shared: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """shared: where all ranks read cosines and sines by token, ``[max_tokens, rotary_dim]``; rank 0 fills it."""
        self._rope = rope
        self._shared = shared
        self._dtype = dtype
        self._max_positions = max_positions
        self._described = described
        self._by_token = rope.spec.depends_on_length
        self._num_positions = 0
        described.by_token = self._by_token
        if shared is not None:
            described.cosines, described.sines = (each.data_ptr() for each in shared)
        if not self._by_token:
            self._grow(min(FIRST_ROTATIONS, max_positions))

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """See `Rotations.fill`."""
        if self._by_token:
            owners, positions = ranges(rows.starts, rows.counts)
            prompts = tables.num_prompt_tokens[rows.slots[owners]]
            self._use(torch.from_numpy(positions), torch.from_numpy(prompts))
        else:
            self.reach(length)

    @property
    def handed_width(self) -> int:
        """See `Rotations.handed_width`."""
        return 2 * self._rope.spec.rotary_dim if self._by_token else 0

    def hand_on(self, rows: torch.Tensor) -> None:
        """See `Rotations.hand_on`."""
        if self._by_token:
            torch.cat((self._cosines, self._sines), dim=1, out=rows)

    def take(self, rows: torch.Tensor) -> None:
        """See `Rotations.take`."""
        if self._by_token:
            # The rows are the link's, to be written again once this step is done.
            self._describe(
                *(half.clone(memory_format=torch.contiguous_format) for half in rows.chunk(2, dim=1))
            )

    def reach(self, length: int) -> None:
        """See `Rotations.reach`."""
        if not self._by_token and length > self._num_positions:
            self._grow(min(max(length, 2 * self._num_positions), self._max_positions))

    def _grow(self, num_positions: int) -> None:
        self._use(torch.arange(num_positions), None)
        self._num_positions = num_positions

    def _use(self, positions: torch.Tensor, prompts: torch.Tensor | None) -> None:
        cosines, sines = self._rope.cos_sin(positions, prompts, self._dtype)
        self._describe(cosines.flatten(1), sines.flatten(1))

    def _describe(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Have steps point to them ``[rows, rotary_dim]``."""
        self._cosines, self._sines = cosines, sines
        if self._shared is None:
            self._described.cosines, self._described.sines = cosines.data_ptr(), sines.data_ptr()
            return
        for place, numbers in zip(self._shared, (cosines, sines), strict=True):
            place[: len(numbers)].copy_(numbers)
