"""Interface between the worker and the model runner: forward passes over KV memory, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.batch import Int, Rows
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import SlotTables


class LogitsSource(Protocol):
    """A runner's last step, as a source of logits."""

    @property
    def max_outputs(self) -> int:
        """Maximum number of tokens per `logits` call."""

    def logits(self, tokens: Int) -> torch.Tensor:
        """Return ``[len(tokens), vocab]`` in float32 or the model's dtype, for tokens of the last step by index.

        The next call overwrites the tensor.
        """


class Runner(LogitsSource, Protocol):
    """A model with its KV memory: `quintet.executor.backends.torch.eager` or `quintet.executor.backends.cpu.program.runner`."""

    @property
    def work_done(self) -> int:
        """See `quintet.executor.interface.StepWorker`."""

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """KV memory of each layer: ``[num_blocks, ...]``, in a runner-specific format."""

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """Compute the rows of a plan and store their keys and values. ``tables`` already hold its deltas."""

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        """Compute a step that needs only tokens, and draw them; None if the runner does not support it.

        settings: settings of every slot (`quintet.executor.sampling.settings`). masks: allowed tokens of some rows,
        awaited between logits and draw. Returns the tokens as int32; the token table holds them too.
        """

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks of KV memory in every layer. int64 ids; no block is both source and target."""
