"""What the worker asks of whatever runs the model: forward passes over its KV memory, and logits of some of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.batch import Int, Rows
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import SlotTables


class GivesLogits(Protocol):
    """Whatever computed the last step, as far as those who look at its logits need it."""

    @property
    def max_outputs(self) -> int:
        """Most tokens whose logits may be asked for at once."""

    def logits(self, tokens: Int) -> torch.Tensor:
        """Return ``[len(tokens), vocab]`` in float32 or the model's dtype, for tokens of the last step by index among them.

        The tensor is overwritten by the next call.
        """


class Runner(GivesLogits, Protocol):
    """A model with its KV memory. `quintet.executor.backends.torch.eager` or `quintet.executor.backends.cpu.program.runner`."""

    @property
    def work_done(self) -> int:
        """See `quintet.executor.interface.StepWorker`."""

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """KV memory of each layer, block by block: ``[num_blocks, ...]``, of any format inside."""

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """Compute the rows of a plan whose deltas ``tables`` already hold, and store their keys and values."""

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        """Compute a step whose rows want a token and nothing else, in one go where the runner can; else return None.

        settings: of every slot (`quintet.executor.sampling.settings`). masks: what some rows may draw, waited for between
        logits and draw. Returns the tokens, int32, which are in the token table as well.
        """

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks of KV memory, in every layer. int64 ids, no block both read and written."""
