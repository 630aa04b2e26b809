"""Cosines and sines by which a step's tokens are rotated, as its program reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quintet.executor.batch import Rows
from quintet.executor.layers.rope import Rope
from quintet.executor.parallel.ranks import Ranks
from quintet.executor.program.step import CRotation
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
            for place, numbers in zip(self._shared or (), (self._cosines, self._sines), strict=False):
                place[: len(positions)].copy_(numbers.flatten(1))
        else:
            self.reach(length)

    def reach(self, length: int) -> None:
        """See `Rotations.reach`."""
        if not self._by_token and length > self._num_positions:
            self._grow(min(max(length, 2 * self._num_positions), self._max_positions))

    def _grow(self, num_positions: int) -> None:
        self._use(torch.arange(num_positions), None)
        self._num_positions = num_positions

    def _use(self, positions: torch.Tensor, prompts: torch.Tensor | None) -> None:
        self._cosines, self._sines = self._rope.cos_sin(positions, prompts, self._dtype)
        if self._shared is None:
            self._described.cosines, self._described.sines = (
                self._cosines.data_ptr(),
                self._sines.data_ptr(),
            )
