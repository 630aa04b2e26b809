"""Draw the step's tokens and write them into the token table, where later plans refer to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.runner import LogitsSource
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.logits_processor import (
    AllowedIds,
    BadWords,
    DrawRows,
    Int,
    LogitBias,
    LogitsProcessor,
    MinTokens,
)
from quintet.executor.sampling.logprobs import Logprobs
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.settings import settings_of, settings_table
from quintet.executor.sampling.thinking import ThinkingBudgets
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.params import PARAMS_WITHOUT_PROCESSOR, SamplingParams
from quintet.wire.step import NewRow, PromptLogprobs, TokenLogprobs

SHAPING: tuple[Callable[[int], LogitsProcessor], ...] = (
    AllowedIds,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
)
"""Logits processors in order. Each is constructed with ``max_num_seqs``."""

_featured_of = attrgetter(
    *(name for name in SamplingParams.__struct_fields__ if name not in PARAMS_WITHOUT_PROCESSOR)
)
_NO_FEATURES = _featured_of(SamplingParams())


class Sampler:
    """The sampler of a worker.

    Rows without logits processors go from the model's logits to a token in one call. A step with only such rows
    spends one integer test on the features.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        tables: SlotTables,
        ops: SamplingOps,
        shaping: Sequence[Callable[[int], LogitsProcessor]] = SHAPING,
        grammars: Grammars | None = None,
        drafts: NDArray[np.int32] | None = None,
    ) -> None:
        """shaping: `SHAPING`, or a device's implementations in the same order. grammars: None without structured outputs.

        drafts: a token table on the host with the draft tokens; None if ``tables`` are on the host.
        """
        self._tables = tables
        self._host_token_ids = tables.token_ids.numpy() if tables.device.type == "cpu" else None
        """The token table as a numpy view on a CPU: for few numbers, several times faster than torch."""
        self._drafts = self._host_token_ids if drafts is None else drafts
        self._ops = ops
        self._vocab_size = vocab_size
        self.settings = settings_table(max_num_seqs)
        """Sampling settings of every slot."""
        self._logprobs = Logprobs(max_num_seqs, ops)
        self._shaping = [(1 << i, make(max_num_seqs)) for i, make in enumerate(shaping)]
        self._processors = (1 << len(self._shaping)) - 1
        self._reports = 1 << len(self._shaping)
        self._reports_prompt = self._reports << 1
        self._has_grammar = self._reports << 2
        self._has_budget = self._reports << 3
        self._budget_due = self._reports << 4
        """Set in a step in which a reasoning budget may force a token."""
        self._thinking = ThinkingBudgets(max_num_seqs)
        self._shapes = self._processors | self._budget_due
        self._needs_logits = self._shapes | self._reports
        self._grammars = grammars
        self._features = np.zeros(max_num_seqs, np.int64)
        """Feature bits per slot."""
        self._num_with_features = 0
        """Slots with a feature bit, free slots included until reuse."""
        self._wide = torch.empty(0, vocab_size)

    def admit(self, row: NewRow) -> None:
        """Store the parameters of a slot's new request."""
        self.settings[row.slot] = settings_of(row.params, row.seed)
        before = self._features[row.slot]
        if before or row.bad_word_ids or _featured_of(row.params) != _NO_FEATURES:
            self._features[row.slot] = features = self._admit_features(row)
            self._num_with_features += bool(features) - bool(before)

    def _admit_features(self, row: NewRow) -> int:
        """Store the parameters of each feature, in place of those of the slot's last request; return the feature bits."""
        features = 0
        for flag, processor in self._shaping:
            features |= flag * processor.admit(row)
        features |= self._reports * self._logprobs.admit_output(row)
        features |= self._reports_prompt * self._logprobs.admit_prompt(row)
        if self._grammars is not None:
            features |= self._has_grammar * self._grammars.admit(row)
        return features | self._has_budget * self._thinking.admit(row)

    def needs_logits(self, rows: Rows) -> bool:
        """Return whether a row needs more in this step than a draw from the raw logits, masked or not."""
        if not self._num_with_features:
            return False
        return bool((self._features_now(rows) & self._needs_logits).any()) or self.reports_prompt(rows)

    def reports_prompt(self, rows: Rows) -> bool:
        """Return whether a row needs log-probabilities of prompt tokens of this step."""
        if not self._num_with_features:
            return False
        features = self._features[rows.slots]
        is_in_prompt = rows.starts + 1 < self._tables.num_prompt_tokens[rows.slots]
        return bool((is_in_prompt & (features & self._reports_prompt != 0)).any())

    def _features_now(self, rows: Rows) -> Int:
        """Return the feature bits of the rows that draw in this step."""
        sampling = rows.sampling
        slots = rows.slots[sampling]
        features = self._features[slots]
        thinking = np.flatnonzero(features & self._has_budget)
        if len(thinking):
            slots, lengths = slots[thinking], rows.draw_positions[thinking]
            due = self._thinking.due(slots, lengths - self._tables.num_prompt_tokens[slots])
            features[thinking[due]] |= self._budget_due
        return features

    def begin_masks(self, rows: Rows) -> StepMasks | None:
        """Start to make masks for rows with structured outputs; None if there are none."""
        if not self._num_with_features or self._grammars is None:
            return None
        sampling = rows.sampling
        slots = rows.slots[sampling]
        which = np.flatnonzero(self._features[slots] & self._has_grammar)
        if not len(which):
            return None
        return self._grammars.begin(slots, rows.draw_positions, which, self._drafts)

    def draw(
        self, rows: Rows, logits: torch.Tensor, masks: Masks | None = None, *, is_draft: bool = False
    ) -> tuple[torch.Tensor, list[TokenLogprobs]]:
        """Draw for every sampling row of ``rows`` from ``logits [S, vocab]`` of any dtype. Does not change the logits.

        masks: the allowed tokens of rows with structured outputs. Returns the tokens, int32[S], and the requested
        log-probabilities. is_draft: ignore reasoning budgets and log-probabilities.
        """
        sampling = rows.sampling
        slots = rows.slots[sampling]
        positions = rows.draw_positions
        features = self._features[slots] & self._processors if is_draft else self._features_now(rows)
        step_features = int(np.bitwise_or.reduce(features))
        if step_features & self._shapes:
            drawn = self._draw_shaped(slots, positions, logits, features, step_features, masks)
        else:
            drawn = self._ops.draw(logits, self.settings, slots, positions, None, masks)
        if self._host_token_ids is not None:
            self._host_token_ids[slots, positions] = drawn.numpy()
        else:
            device = self._tables.device
            self._tables.token_ids[to_device(slots, device), to_device(positions, device)] = drawn
        if not step_features & self._reports:
            return drawn, []
        which = np.flatnonzero(features & self._reports)
        return drawn, self._logprobs.of_drawn(logits, drawn, slots, which, sampling)

    def shapes(self, rows: Rows) -> bool:
        """Return whether a row that draws has a logits processor."""
        return bool((self._features[rows.slots[rows.sampling]] & self._processors).any())

    def prompt_logprobs(self, rows: Rows, runner: LogitsSource) -> list[PromptLogprobs]:
        """Return log-probabilities of the prompt tokens of the step that ``runner`` has just computed."""
        which = np.flatnonzero(self._features[rows.slots] & self._reports_prompt)
        if not len(which):
            return []
        return self._logprobs.of_prompt(rows, which, self._tables, runner)

    def _draw_shaped(
        self,
        slots: Int,
        positions: Int,
        logits: torch.Tensor,
        features: Int,
        step_features: int,
        masks: Masks | None,
    ) -> torch.Tensor:
        """Copy the rows with logits processors as fp32 and draw from the copies; draw from the other rows directly."""
        draw, settings = self._ops.draw, self.settings
        shaped = np.flatnonzero(features & self._shapes)
        shaped_slots, features = slots[shaped], features[shaped]
        wide = self._copy(logits, shaped)  # [shaped rows, vocab]
        rows = DrawRows(
            self._tables, shaped_slots, positions[shaped], self._tables.num_prompt_tokens[shaped_slots]
        )
        for flag, processor in self._shaping:
            if step_features & flag:
                processor.apply(wide, rows, np.flatnonzero(features & flag))
        if step_features & self._budget_due:
            self._thinking.apply(wide, rows, np.flatnonzero(features & self._budget_due))
        own_masks = None if masks is None else masks.take(shaped)
        drawn = draw(wide, settings, shaped_slots, positions[shaped], None, own_masks)
        if len(shaped) == len(slots):
            return drawn
        plain = np.delete(np.arange(len(slots)), shaped)
        own_masks = None if masks is None else masks.take(plain)
        of_plain = draw(logits, settings, slots[plain], positions[plain], plain, own_masks)
        all_tokens = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        all_tokens[to_device(shaped, logits.device)] = drawn
        all_tokens[to_device(plain, logits.device)] = of_plain
        return all_tokens

    def _copy(self, logits: torch.Tensor, which: Int) -> torch.Tensor:
        """Return these rows in fp32. Reuses the buffer: allocating it in each step costs more than filling it."""
        if len(which) > len(self._wide) or self._wide.device != logits.device:
            num_rows = max(len(which), min(2 * len(self._wide), len(self._features)))
            self._wide = torch.empty((num_rows, self._vocab_size), device=logits.device)
        if len(which) < len(logits):
            logits = logits[to_device(which, logits.device)]
        return self._wide[: len(which)].copy_(logits)
