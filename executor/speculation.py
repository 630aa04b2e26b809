"""Speculative decoding: choose draft tokens, and verify them in the step that computes them.

A row with drafts is computed as several rows of one token, at consecutive positions of the same slot. A step writes
keys and values of all rows before any row reads, so each of these rows sees the drafts before it. Each draws a token
with its own position, as it would alone. Draws are accepted up to the first that differs from the draft after it:
the tokens are those without drafts, bit for bit.

    tokens    … t5              the executor knows 6 tokens; the plan allows 3 drafts
    drafts       d6  d7  d8
    rows        (5) (6) (7) (8)
    draws       t6  t7  t8  t9   d6 = t6, d7 ≠ t7: t6 and t7 are accepted

Rejected drafts leave keys and values after the newest token. Later steps overwrite them before they read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int, ranges
from quintet.executor.slots import SlotTables
from quintet.wire.config import SpeculativeConfig
from quintet.wire.step import StepPlan, StepResult

Tokens = NDArray[np.int32]


class Drafter(Protocol):
    """Source of draft tokens."""

    def propose(self, tokens: Tokens, most: int) -> Tokens:
        """Return at most ``most`` tokens that may follow ``tokens``, the prompt and outputs of a request."""


class NgramDrafter:
    """Prompt lookup: the tokens that followed the last earlier occurrence of the newest tokens.

    The longest suffix of ``longest`` to ``shortest`` tokens that occurs earlier is used. The search takes one pass over
    the tokens of the request.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, tokens: Tokens, most: int) -> Tokens:
        """See `Drafter.propose`."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of occurrences of the newest token
        length = 1
        found = ends if length >= self._shortest else ends[:0]
        while len(ends) and length < self._longest:
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]] if length < len(tokens) else ends[:0]
            length += 1
            if len(ends) and length >= self._shortest:
                found = ends
        if not len(found):
            return tokens[:0]
        begin = int(found[-1]) + 1
        return tokens[begin + np.arange(most) % (len(tokens) - begin)]  # an overlapping copy repeats the text


@dataclass(slots=True)
class _Verification:
    """A plan with one row per position that is computed, and its relation to the core's plan."""

    plan: StepPlan
    owners: Int
    """Per row: its row in the core's plan."""
    starts: Int
    """int64[R]: resolved starts of the core's rows."""
    drafts: list[tuple[int, Tokens]]
    """Rows of the core's plan that verify drafts, and these."""


class Speculation:
    """Drafts of a worker's slots."""

    def __init__(self, config: SpeculativeConfig, tables: SlotTables, max_rows: int, max_tokens: int) -> None:
        """max_rows, max_tokens: the largest step, drafts included."""
        self._tables = tables
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        self._num_tokens: Int = np.zeros(len(self._token_ids), np.int64)
        """Known tokens of each slot."""

    def compute(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Return the result of a plan, with drafts where it allows them. ``compute`` computes and draws rows."""
        verification = self._expand(plan)
        result = compute(verification.plan)
        return self._accept(plan, verification, result)

    def _expand(self, plan: StepPlan) -> _Verification:
        """Resolve starts, choose drafts and write them into the token table."""
        slots, starts, counts = (
            np.frombuffer(column, np.int32).astype(np.int64)
            for column in (plan.slots, plan.starts, plan.counts)
        )
        for new in plan.new_rows:
            self._num_tokens[new.slot] = len(new.token_ids) // 4
        most = np.frombuffer(plan.drafts, np.uint8)
        starts = np.where(most > 0, self._num_tokens[slots] - 1, starts)
        num_free = min(self._max_rows - len(slots), self._max_tokens - int(counts.sum()))
        repeats = np.ones(len(slots), np.int64)
        drafts: list[tuple[int, Tokens]] = []
        for row in np.flatnonzero(most > 1).tolist():
            begin = int(starts[row]) + 1
            wanted = min(int(most[row]) - 1, num_free)
            if wanted <= 0:
                break
            line = self._token_ids[slots[row]]
            proposed = self._drafter.propose(line[:begin], wanted).copy()
            if len(proposed):
                line[begin : begin + len(proposed)] = proposed
                drafts.append((row, proposed))
                repeats[row] += len(proposed)
                num_free -= len(proposed)
        owners, row_starts = ranges(starts, repeats)
        expanded = msgspec.structs.replace(
            plan,
            slots=slots[owners].astype(np.int32).tobytes(),
            starts=row_starts.astype(np.int32).tobytes(),
            counts=counts[owners].astype(np.int32).tobytes(),
            samples=np.frombuffer(plan.samples, np.uint8)[owners].tobytes(),
            drafts=b"",
        )
        return _Verification(expanded, owners, starts, drafts)

    def _accept(self, plan: StepPlan, verification: _Verification, result: StepResult) -> StepResult:
        """Return the result in rows of the core's plan, without rejected tokens; note the lengths."""
        owners = verification.owners
        tokens = np.frombuffer(result.token_ids, np.int32)
        draws = np.flatnonzero(np.frombuffer(verification.plan.samples, np.uint8))
        """Row of each token in the expanded plan."""
        is_kept = np.ones(len(tokens), np.bool_)
        num_tokens, num_drafts = (np.full(len(plan.samples), n, np.uint8) for n in (1, 0))
        first_draws = np.searchsorted(owners[draws], np.arange(len(plan.samples)))
        for row, proposed in verification.drafts:
            first, end = int(first_draws[row]), int(first_draws[row]) + len(proposed)
            differs = np.flatnonzero(tokens[first:end] != proposed)
            num_accepted = int(differs[0]) if len(differs) else len(proposed)
            is_kept[first + num_accepted + 1 : end + 1] = False
            num_tokens[row], num_drafts[row] = 1 + num_accepted, len(proposed)
        sampling = np.flatnonzero(np.frombuffer(plan.samples, np.uint8))
        slots, counts = (np.frombuffer(column, np.int32) for column in (plan.slots, plan.counts))
        self._num_tokens[slots[sampling]] = (verification.starts + counts + num_tokens)[sampling]
        kept_rows = set(draws[is_kept].tolist())
        result.token_ids = tokens[is_kept].tobytes()
        result.num_tokens = num_tokens[sampling].tobytes()
        result.num_drafts = num_drafts[sampling].tobytes()
        result.logprobs = [
            msgspec.structs.replace(entry, row=int(owners[entry.row]))
            for entry in result.logprobs
            if entry.row in kept_rows
        ]
        for prompt_entry in result.prompt_logprobs:
            prompt_entry.row = int(owners[prompt_entry.row])
        if result.failed:
            result.failed = owners[np.frombuffer(result.failed, np.int32)].astype(np.int32).tobytes()
        return result
