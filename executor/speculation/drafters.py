"""Sources of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quintet.executor.memory import Bits
from quintet.executor.ragged import Int
from quintet.executor.slots import SlotTables
from quintet.executor.speculation.gram_index import Tokens, compiled_functions, doubling
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.request_index import RequestIndexes
from quintet.wire.config import SpeculativeConfig
from quintet.wire.step import StepPlan

MAX_GRAM, CONTEXT_TOKENS = 8, 8
"""Longest indexed gram of suffix decoding, and the prompt tokens that are cached before an output."""

MAX_DRAFTS = 255
"""Of a row; the limit of the compiled functions."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a step that can verify drafts. Each column is int64[N]."""

    slots: Int
    num_tokens: Int
    """Known tokens of each slot: the prompt and the outputs."""
    counts: Int
    """Maximum number of drafts of each row, at least 1."""


class Drafter(Protocol):
    """Source of draft tokens."""

    @property
    def step_time(self) -> tuple[float, float]:
        """Measured seconds of proposing one more token for all rows: a fixed part, and one per row. Zeros if negligible."""

    @property
    def output_cache(self) -> OutputCache | None:
        """Outputs of earlier requests, if the drafter uses them."""

    @property
    def reads_steps(self) -> bool:
        """True if the drafter needs `observe` and `note_computed`."""

    def end(self, slot: int, num_tokens: int) -> None:
        """Note that the request of a slot ended or was preempted, with so many known tokens. The tables still hold them."""

    def note(self, plan: StepPlan) -> None:
        """Note the deltas and rows of each plan, before `propose` for its rows. The slot tables hold the deltas."""

    def observe(self, num_tokens: int) -> Bits:
        """Return the hidden states ``[num_tokens, width]`` of the served model's last step. Its next one changes them."""

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: Bits) -> None:
        """Note rows that the served model has computed in a step, or in several in a row. Columns are int64[R].

        num_valid: computed tokens of each row, without rejected drafts. hidden: of all tokens, see `observe`.
        """

    def num_missing(self, slots: Int, num_tokens: Int) -> Int | None:
        """Return the tokens that `propose` computes for each slot, besides the newest one. None if it computes none.

        num_tokens: known tokens of each slot, as in `DraftRows`.
        """

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """Return, for each row, up to ``counts`` tokens that may follow the known ones."""


class NgramDrafter:
    """Prompt lookup: the tokens that followed the last earlier occurrence of the newest tokens.

    The longest suffix of ``longest`` to ``shortest`` tokens that occurs earlier is used (see `GramIndex.find`).
    """

    step_time = 0.0, 0.0
    output_cache = None
    reads_steps = False

    def __init__(self, tables: SlotTables, shortest: int, longest: int) -> None:
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._longest = longest
        self._indexes = RequestIndexes(self._token_ids, doubling(shortest, longest), longest)

    def end(self, slot: int, num_tokens: int) -> None:
        self._indexes.drop(slot)

    def note(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._indexes.drop(new.slot)

    def observe(self, num_tokens: int) -> Bits:
        """See `Drafter.observe`. There are none."""
        return np.empty(0, np.int16)

    def note_computed(self, *_: object) -> None:
        """See `Drafter.note_computed`."""

    def num_missing(self, slots: Int, num_tokens: Int) -> None:
        """See `Drafter.num_missing`."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [self._lookup(*row) for row in zip(*columns, strict=True)]

    def _lookup(self, slot: int, num_tokens: int, most: int) -> Tokens:
        tokens: Tokens = self._token_ids[slot]
        context = tokens[max(0, num_tokens - self._longest) : num_tokens]
        places = self._indexes.updated(slot, num_tokens).find(context, enough=1).places
        if not places:
            return tokens[:0]
        begin = places[0]
        return tokens[begin + np.arange(most) % (num_tokens - begin)]  # an overlapping copy repeats the text


@dataclass(frozen=True, slots=True)
class _Request:
    scope: int
    begin: int
    """Position of the first token to cache: those before it are the prompt, or were cached at a preemption."""
    stop_ids: list[int]


class SuffixDrafter:
    """Suffix decoding (Oliaro et al., 2024): the most frequent continuation of the longest match.

    Matches come from the request's own tokens, and from outputs of earlier requests of the same scope. The choice is
    compiled: ``csrc/cpu/ops/suffix_drafts.cpp``.
    """

    step_time = 0.0, 0.0
    reads_steps = False

    def __init__(self, config: SpeculativeConfig, tables: SlotTables) -> None:
        self._token_ids: Tokens = tables.token_ids.numpy()
        depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        grams = doubling(1, min(MAX_GRAM, depth - 1))
        self._indexes = RequestIndexes(self._token_ids, grams, depth - 1)
        self.output_cache = OutputCache(
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_corpus_tokens,
            grams,
            depth - 1,
        )
        self._min_probability = config.suffix_decoding_min_token_prob
        by_match = [0, *(min(int(factor * length), depth - length) for length in range(1, depth))]
        self._max_drafts: Int = np.maximum.accumulate(by_match)
        """Maximum drafts by length of the match. A long match counts as a shorter one if that allows more drafts."""
        self._compiled = compiled_functions().suffix_drafts
        self._drafts: Tokens = np.zeros(MAX_DRAFTS, np.int32)
        self._addresses = self._max_drafts.ctypes.data, self._drafts.ctypes.data
        self._requests: dict[int, _Request] = {}

    def end(self, slot: int, num_tokens: int) -> None:
        """See `Drafter.end`. Adds the output to the cache."""
        self._indexes.drop(slot)
        request = self._requests.pop(slot, None)
        if request is None:
            return
        outputs = self._token_ids[slot, request.begin : num_tokens]
        stops = np.flatnonzero(np.isin(outputs, request.stop_ids))
        if len(stops):
            num_tokens = request.begin + int(stops[0]) + 1  # later tokens are of a step in flight
        if len(outputs):
            begin = max(0, request.begin - CONTEXT_TOKENS)
            self.output_cache.add(self._token_ids[slot, begin:num_tokens], request.scope)

    def note(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._indexes.drop(new.slot)
            self._requests[new.slot] = _Request(new.draft_scope, len(new.token_ids) // 4, new.stop_ids)

    def observe(self, num_tokens: int) -> Bits:
        """See `Drafter.observe`. There are none."""
        return np.empty(0, np.int16)

    def note_computed(self, *_: object) -> None:
        """See `Drafter.note_computed`."""

    def num_missing(self, slots: Int, num_tokens: Int) -> None:
        """See `Drafter.num_missing`."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [self._continue(*row) for row in zip(*columns, strict=True)]

    def _continue(self, slot: int, num_tokens: int, most: int) -> Tokens:
        own, cache = self._indexes.updated(slot, num_tokens), self.output_cache
        max_drafts, drafts = self._addresses
        num_drafts = self._compiled(
            *(own.address, num_tokens, cache.index.address, self._requests[slot].scope, cache.oldest),
            *(max_drafts, min(most, MAX_DRAFTS), self._min_probability, drafts),
        )
        return self._drafts[:num_drafts].copy()


DRAFTERS: dict[str, Callable[[SpeculativeConfig, SlotTables], Drafter]] = {
    "ngram": lambda config, tables: NgramDrafter(tables, config.prompt_lookup_min, config.prompt_lookup_max),
    "suffix": SuffixDrafter,
}
"""Drafters without a model, by `SpeculativeConfig.method`."""
