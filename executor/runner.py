"""Interface between the worker and the model runner: forward passes over KV memory, and logits."""

from __future__ import annotations

from typing import Protocol

import torch

from quintet.executor.pooling import HiddenSource
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables


class LogitsSource(Protocol):
    """A runner's last step, as a source of logits."""

    @property
    def max_outputs(self) -> int:
        """Maximum number of tokens per `logits` call."""

    def logits(self, tokens: Int) -> torch.Tensor:
        """Return ``[len(tokens), vocab]`` in float32 or the model's dtype, for tokens of the last step by index.

        The next call overwrites the tensor.
        """


class Runner(LogitsSource, HiddenSource, Protocol):
    """Forward passes of one model over the worker's KV memory.

    Implementations: `quintet.executor.backends.cpu.program.runner`, `quintet.executor.backends.torch.eager`, for models of
    transformers `quintet.executor.backends.torch.fallback`, and for draft models on a device
    `quintet.executor.backends.cuda.draft_runner`.
    """

    @property
    def work_done(self) -> int:
        """See `quintet.executor.interface.StepWorker`."""

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """Compute the rows of a plan and store their keys and values. ``tables`` already hold its deltas."""

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        """Compute a step that needs only tokens, and draw them; None if the runner does not support it.

        settings: settings of every slot (`quintet.executor.sampling.settings`). masks: allowed tokens of some rows,
        awaited between logits and draw. Returns the tokens as int32; the token table holds them too.
        """
