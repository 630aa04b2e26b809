"""Draws the step's tokens and writes them into the token table, for the next plan to find."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quintet.executor.batch import Rows
from quintet.executor.memory import to_device
from quintet.executor.ops.table import Ops
from quintet.executor.runner import Runner
from quintet.executor.sampling.allowed_ids import AllowedIds
from quintet.executor.sampling.bad_words import BadWords
from quintet.executor.sampling.choice import choose
from quintet.executor.sampling.concern import Concern, DrawRows, Int
from quintet.executor.sampling.logit_bias import LogitBias
from quintet.executor.sampling.logprobs import Logprobs
from quintet.executor.sampling.min_p import MinP
from quintet.executor.sampling.min_tokens import MinTokens
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.philox import uniform
from quintet.executor.sampling.temperature import Temperature
from quintet.executor.sampling.top_k import TopK
from quintet.executor.sampling.top_p import TopP
from quintet.executor.slots import SlotTables
from quintet.wire.step import NewRow, PromptLogprobs, TokenLogprobs

SHAPING: tuple[Callable[[int, int], Concern], ...] = (AllowedIds, BadWords, MinTokens, LogitBias, Penalties)
"""What changes the logits of any row, in this order. Each is made with ``(max_num_seqs, vocab_size)``."""

FILTERS: tuple[Callable[[int, int], Concern], ...] = (Temperature, MinP, TopK, TopP)
"""What changes the logits of rows that draw at random, after that, in this order."""

SEED_MASK = (1 << 64) - 1


class Sampler:
    """One per worker. A step in which nobody wants a concern spends one test of one integer on it."""

    def __init__(self, max_num_seqs: int, vocab_size: int, tables: SlotTables, ops: Ops) -> None:
        self._tables = tables
        self._ops = ops
        self._vocab_size = vocab_size
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._logprobs = Logprobs(max_num_seqs, vocab_size)
        concerns = [make(max_num_seqs, vocab_size) for make in (*SHAPING, *FILTERS)]
        flagged = [(1 << i, concern) for i, concern in enumerate(concerns)]
        self._shaping, self._filters = flagged[: len(SHAPING)], flagged[len(SHAPING) :]
        self._shapes = sum(flag for flag, _ in self._shaping)
        self._random = 1 << len(flagged)
        self._reports = self._random << 1
        self._reports_prompt = self._random << 2
        self._wants = np.zeros(max_num_seqs, np.int64)
        """Per slot, one bit per thing its tenant wants."""
        self._wide = torch.empty(0, vocab_size)
        self._scratch = torch.empty(0, vocab_size)

    def admit(self, row: NewRow) -> None:
        """Note what a slot's new tenant asks for."""
        wants = 0
        for flag, concern in (*self._shaping, *self._filters):
            wants |= flag * concern.admit(row)
        wants |= self._random * (not row.params.greedy)
        wants |= self._reports * self._logprobs.admit_output(row)
        wants |= self._reports_prompt * self._logprobs.admit_prompt(row)
        self._wants[row.slot] = wants
        self._seeds[row.slot] = row.seed & SEED_MASK

    def draw(self, rows: Rows, logits: torch.Tensor) -> tuple[torch.Tensor, list[TokenLogprobs]]:
        """Draw for every sampling row of ``rows``, from ``logits [S, vocab]`` of any dtype, which stay as they are.

        Returns the tokens, int64[S], and the log-probabilities that were asked for.
        """
        slots = rows.slots[rows.sampling]
        positions = (rows.starts + rows.counts)[rows.sampling]
        wants = self._wants[slots]
        wanted = int(np.bitwise_or.reduce(wants))
        if wanted & (self._shapes | self._random):
            drawing = DrawRows(
                self._tables, self._ops, slots, positions, self._tables.num_prompt_tokens[slots]
            )
            drawn = self._draw_shaped(drawing, logits, wants, wanted)
        else:
            drawn = self._ops.argmax(logits)
        device = self._tables.device
        self._tables.token_ids[to_device(slots, device), to_device(positions, device)] = drawn.to(torch.int32)
        if not wanted & self._reports:
            return drawn, []
        which = np.flatnonzero(wants & self._reports)
        return drawn, self._logprobs.of_drawn(logits, drawn, slots, which, rows.sampling)

    def prompt_logprobs(self, rows: Rows, runner: Runner) -> list[PromptLogprobs]:
        """Return log-probabilities of prompt tokens that the step ``runner`` just computed made known."""
        which = np.flatnonzero(self._wants[rows.slots] & self._reports_prompt)
        if not len(which):
            return []
        return self._logprobs.of_prompt(rows, which, self._tables, runner)

    def _draw_shaped(self, rows: DrawRows, logits: torch.Tensor, wants: Int, wanted: int) -> torch.Tensor:
        self._reserve(len(logits), logits.device)
        wide = self._wide[: len(logits)].copy_(logits)  # [S, vocab] fp32
        for flag, concern in self._shaping:
            if wanted & flag:
                concern.apply(wide, rows, np.flatnonzero(wants & flag))
        random = np.flatnonzero(wants & self._random)
        if len(random) == len(logits):
            return self._draw_random(rows, wide, wants, wanted)
        drawn = self._ops.argmax(wide)
        if len(random):
            index = to_device(random, logits.device)
            drawn[index] = self._draw_random(rows.take(random), wide[index], wants[random], wanted)
        return drawn

    def _draw_random(self, rows: DrawRows, wide: torch.Tensor, wants: Int, wanted: int) -> torch.Tensor:
        for flag, concern in self._filters:
            if wanted & flag:
                which = np.flatnonzero(wants & flag)
                if len(which):
                    concern.apply(wide, rows, which)
        uniforms = to_device(uniform(self._seeds[rows.slots], rows.lengths), wide.device)
        return choose(wide, uniforms, self._scratch[: len(wide)])

    def _reserve(self, num_rows: int, device: torch.device) -> None:
        """Keep room for so many rows of logits: asking the system for it in each step costs more than filling it."""
        if num_rows > len(self._wide) or self._wide.device != device:
            shape = (max(num_rows, min(2 * len(self._wide), len(self._wants))), self._vocab_size)
            self._wide = torch.empty(shape, device=device)
            self._scratch = torch.empty(shape, device=device)
