"""Draft heads on a device. Features stay there, and those of a step are kept when it is launched, in the order of the steps.

A step keeps the features of all tokens of a request with drafts. How many of them were accepted is known when the request's next
drafts are asked for, or when its next step is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cuda.draft_runner import DraftRunner
from quintet.executor.memory import Bits, to_device
from quintet.executor.models.draft_heads import MedusaHeads
from quintet.executor.ragged import Int, ranges
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.head import DraftHead, HeadDrafter, HeadLayer
from quintet.executor.speculation.medusa import MedusaDrafter
from quintet.wire.config import DraftModelConfig
from quintet.wire.step import StepPlan


class DeviceBits:
    """Values of a tensor on a device, indexed by arrays of the host as `Bits` are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: object) -> DeviceBits:
        return DeviceBits(self.tensor[self._on_device(index)])

    def __setitem__(self, index: object, values: DeviceBits | int) -> None:
        self.tensor[self._on_device(index)] = values.tensor if isinstance(values, DeviceBits) else values

    def reshape(self, *shape: int) -> DeviceBits:
        """Return a view of this shape."""
        return DeviceBits(self.tensor.view(*shape))

    def _on_device(self, index: Any) -> Any:
        """Return the index with its arrays on the device. A mask there would make the host wait for its sum."""
        if isinstance(index, tuple):
            return tuple(self._on_device(each) for each in index)
        if not isinstance(index, np.ndarray):
            return index
        numbers = np.flatnonzero(index) if index.dtype == np.bool_ else index
        return to_device(np.ascontiguousarray(numbers, np.int64), self.tensor.device)


def device_bits(tensor: torch.Tensor) -> Bits:
    """Return the values of a tensor, for code that indexes `Bits`."""
    return cast("Bits", DeviceBits(tensor))


class DeviceHeadDrafter(HeadDrafter):
    """The drafter of a head on a device. `Speculation` does not observe its steps."""

    reads_steps = False

    def __init__(
        self,
        config: DraftModelConfig,
        head: DraftHead,
        layers: Sequence[DraftRunner],
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """tables, sampler: of the served model; the tables are on the host."""
        runners = [layer.steps.runner for layer in layers]
        self._device_ids = runners[0].tables.token_ids
        kept = [
            HeadLayer(layer, runner.kv, runner.received_hidden, runner.kept_hidden)
            for layer, runner in zip(layers, runners, strict=True)
        ]
        num_blocks = runners[0].pool.num_blocks
        super().__init__(config, head, kept, None, num_blocks, tables, sampler, device_bits)

    def note(self, plan: StepPlan) -> None:
        try:
            super().note(plan)
        except torch.OutOfMemoryError:  # the copied blocks get no drafts
            targets = np.frombuffer(plan.copies, np.int32)[1::2]
            self._computed[targets] = self._featured[targets] = 0

    def note_launched(self, rows: Rows, drafts: Sequence[tuple[int, Tokens]], hidden: torch.Tensor) -> None:
        """Keep the features of a step after its launch. drafts: by row. hidden: of the served model, ``[tokens, width]``."""
        slots, starts, counts = rows.slots, rows.starts, rows.counts
        self._note_accepted(slots, starts)
        which, positions = ranges(starts, counts)
        self._keep_features(slots[which], positions, hidden)
        num_known = counts.copy()
        for row, tokens in drafts:
            num_known[row] -= len(tokens)
        self._note_rows(slots, starts, num_known)

    def _note_accepted(self, slots: Int, ends: Int) -> None:
        """Note that the tokens before ``ends`` have features: drafts of the newest step were accepted."""
        known = self._num_known[slots]
        behind = np.flatnonzero((known >= 0) & (ends > known))
        if len(behind):
            self._note_rows(slots[behind], known[behind], (ends - known)[behind])

    def _gets_drafts(self, slots: Int, num_tokens: Int) -> NDArray[np.bool_]:
        self._note_accepted(slots, num_tokens - 1)
        return super()._gets_drafts(slots, num_tokens)

    def _put_tokens(self, slots: Int, positions: Int, tokens: Tokens) -> None:
        super()._put_tokens(slots, positions, tokens)
        device = self._device_ids.device
        self._device_ids[to_device(slots, device), to_device(positions, device)] = to_device(tokens, device)


class DeviceMedusaDrafter(MedusaDrafter):
    """The drafter of Medusa heads on a device. It keeps features of as many newest tokens as a step with drafts has."""

    reads_steps = False

    def __init__(
        self,
        model: MedusaHeads,
        heads: Sequence[DraftRunner],
        max_drafts: int,
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """max_drafts: of a request in a step. tables, sampler: of the served model; the tables are on the host."""
        inputs = [(head.steps.runner.received_hidden, head) for head in heads]
        super().__init__(model, inputs, None, 1 + max_drafts, tables, sampler)

    def note_launched(self, rows: Rows, drafts: Sequence[tuple[int, Tokens]], hidden: torch.Tensor) -> None:
        """See `DeviceHeadDrafter.note_launched`."""
        counts, ends = rows.counts, rows.starts + rows.counts
        kept = np.minimum(counts, self._features.shape[1])
        _, tokens = ranges(np.cumsum(counts) - kept, kept)
        self._keep(rows.slots, ends - kept, ends, hidden[self._on_device(tokens)])


ObservingDrafter = DeviceHeadDrafter | DeviceMedusaDrafter
"""Drafters with `note_launched`."""
