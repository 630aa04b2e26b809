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
    """Cosine and sine tables of a model's RoPE layers."""

    def __init__(
        self, ropes: Sequence[Rope], dtype: torch.dtype, max_positions: int, ranks: Ranks | None = None
    ) -> None:
        self._descriptors = (CRotation * max(1, len(ropes)))()
        self._rotations: list[_Rotation] = []
        self._ranks, num_shared = None, 0
        for rope, descriptor in zip(ropes, self._descriptors, strict=False):
            shared, width = None, rope.spec.rotary_dim
            if ranks is not None and rope.spec.depends_on_length:
                shared = (
                    ranks.rotated(num_shared, width, dtype),
                    ranks.rotated(num_shared + width, width, dtype),
                )
                num_shared += 2 * width
                self._ranks = ranks
            self._rotations.append(_Rotation(rope, dtype, max_positions, descriptor, shared))
        self.num_ready = self._num_ready()
        """See `_Rotation.num_ready`; of all rotations."""

    @property
    def address(self) -> int:
        """Address of the C descriptors; valid while this object lives."""
        return ctypes.addressof(self._descriptors)

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """Point the descriptors at the rotations of every token of ``rows``. length: the largest position plus 1."""
        if self._ranks is not None:
            self._ranks.wait_for_all()  # other ranks may still read those of the last step
        for rotation in self._rotations:
            rotation.fill(length, rows, tables)
        self.num_ready = self._num_ready()

    def _num_ready(self) -> int:
        return min((rotation.num_ready for rotation in self._rotations), default=sys.maxsize)

    @property
    def handed_width(self) -> int:
        """Elements per token to send to the next stage: cosines and sines that depend on more than the position."""
        return sum(rotation.handed_width for rotation in self._rotations)

    def write_handover(self, rows: torch.Tensor) -> None:
        """Write the current step's values into rows ``[num_tokens, handed_width]`` for the next stage."""
        for rotation, part in zip(self._rotations, self._parts(rows), strict=True):
            rotation.write_handover(part)

    def take(self, rows: torch.Tensor) -> None:
        """Use the values that the previous stage sent, instead of `fill`. No rank reads the last step's any more."""
        for rotation, part in zip(self._rotations, self._parts(rows), strict=True):
            rotation.take(part)

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return list(rows.split([rotation.handed_width for rotation in self._rotations], dim=1))

    def reach(self, length: int) -> None:
        """Extend position-only tables to ``length`` positions; a rank other than 0 knows only the length of a step."""
        for rotation in self._rotations:
            rotation.reach(length)


class _Rotation:
    """Cosines and sines of one RoPE.

    Indexed by position, and grown on demand. Indexed by token if they depend on more than the position.
    """

    def __init__(
        self,
        rope: Rope,
        dtype: torch.dtype,
        max_positions: int,
        descriptor: CRotation,
        shared: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """shared: per-token cosines and sines ``[max_tokens, rotary_dim]`` in shared memory; rank 0 fills them."""
        self._rope = rope
        self._shared = shared
        self._dtype = dtype
        self._max_positions = max_positions
        self._descriptor = descriptor
        self._by_token = rope.spec.depends_on_length
        self.num_ready = 0
        """Positions for which `fill` has nothing to do; 0 if the values depend on more than the position."""
        descriptor.by_token = self._by_token
        if shared is not None:
            descriptor.cosines, descriptor.sines = (each.data_ptr() for each in shared)
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

    def write_handover(self, rows: torch.Tensor) -> None:
        """See `Rotations.write_handover`."""
        if self._by_token:
            torch.cat((self._cosines, self._sines), dim=1, out=rows)

    def take(self, rows: torch.Tensor) -> None:
        """See `Rotations.take`."""
        if self._by_token:
            # The link reuses the memory of the rows after this step.
            self._point_to(
                *(half.clone(memory_format=torch.contiguous_format) for half in rows.chunk(2, dim=1))
            )

    def reach(self, length: int) -> None:
        """See `Rotations.reach`."""
        if not self._by_token and length > self.num_ready:
            self._grow(min(max(length, 2 * self.num_ready), self._max_positions))

    def _grow(self, num_positions: int) -> None:
        self._use(torch.arange(num_positions), None)
        self.num_ready = num_positions

    def _use(self, positions: torch.Tensor, prompts: torch.Tensor | None) -> None:
        cosines, sines = self._rope.cos_sin(positions, prompts, self._dtype)
        self._point_to(cosines.flatten(1), sines.flatten(1))

    def _point_to(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Point the descriptor at ``cosines`` and ``sines`` ``[rows, rotary_dim]``, or copy them to shared memory."""
        self._cosines, self._sines = cosines, sines
        if self._shared is None:
            self._descriptor.cosines, self._descriptor.sines = cosines.data_ptr(), sines.data_ptr()
            return
        for place, numbers in zip(self._shared, (cosines, sines), strict=True):
            place[: len(numbers)].copy_(numbers)
