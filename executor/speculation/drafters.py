"""Sources of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quintet.executor.ragged import Int
from quintet.executor.slots import SlotTables
from quintet.executor.speculation.gram_index import Matches, Tokens, doubling
from quintet.executor.speculation.output_cache import END, OutputCache
from quintet.executor.speculation.request_index import RequestIndexes
from quintet.wire.config import SpeculativeConfig
from quintet.wire.step import StepPlan

MAX_GRAM, CONTEXT_TOKENS = 8, 8
"""Longest indexed gram of suffix decoding, and the prompt tokens that are cached before an output."""


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
        """True if the drafter needs `note_computed`."""

    def end(self, slot: int, num_tokens: int) -> None:
        """Note that the request of a slot ended or was preempted, with so many known tokens. The tables still hold them."""

    def note(self, plan: StepPlan) -> None:
        """Note the deltas and rows of each plan, before `propose` for its rows. The slot tables hold the deltas."""

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int) -> None:
        """Note the rows of a step that the served model has computed, with or without drafts. Columns are int64[R].

        num_valid: computed tokens of each row, without rejected drafts.
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
        self._indexes = RequestIndexes(self._token_ids, doubling(shortest, longest), longest)

    def end(self, slot: int, num_tokens: int) -> None:
        """See `Drafter.end`."""
        self._indexes.drop(slot)

    def note(self, plan: StepPlan) -> None:
        """See `Drafter.note`."""
        for new in plan.new_rows:
            self._indexes.drop(new.slot)

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int) -> None:
        """See `Drafter.note_computed`."""

    def num_missing(self, slots: Int, num_tokens: Int) -> None:
        """See `Drafter.num_missing`."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`."""
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [self._lookup(*row) for row in zip(*columns, strict=True)]

    def _lookup(self, slot: int, num_tokens: int, most: int) -> Tokens:
        tokens: Tokens = self._token_ids[slot]
        places = self._indexes.find(slot, num_tokens, self._indexes.context(slot, num_tokens), 1).places
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

    Matches come from the request's own tokens, and from outputs of earlier requests of the same scope. The source with
    more expected accepted drafts is used. The probability of a draft is estimated as the share of the matches that
    continue with all drafts up to it.
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
        self._max_drafts: list[int] = np.maximum.accumulate(by_match).tolist()
        """Maximum drafts by length of the match. A long match counts as a shorter one if that allows more drafts."""
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
        """See `Drafter.note`."""
        for new in plan.new_rows:
            self._indexes.drop(new.slot)
            self._requests[new.slot] = _Request(new.draft_scope, len(new.token_ids) // 4, new.stop_ids)

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int) -> None:
        """See `Drafter.note_computed`."""

    def num_missing(self, slots: Int, num_tokens: Int) -> None:
        """See `Drafter.num_missing`."""

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`."""
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [np.array(self._continue(*row), np.int32) for row in zip(*columns, strict=True)]

    def _continue(self, slot: int, num_tokens: int, most: int) -> list[int]:
        context, request = self._indexes.context(slot, num_tokens), self._requests[slot]
        own = self._indexes.find(slot, num_tokens, context)
        drafts, score = self._grow(self._token_ids[slot, :num_tokens], own, most)
        if score == most:
            return drafts
        shared = self.output_cache.find(context, request.scope)
        if self._max_drafts[shared.length] <= score:
            return drafts  # the sum of so many probabilities is not higher
        others, others_score = self._grow(self.output_cache.tokens, shared, most)
        return others if others_score > score else drafts

    def _grow(self, tokens: Tokens, matches: Matches, most: int) -> tuple[list[int], float]:
        """Return the most frequent continuation and the sum of its estimated probabilities.

        tokens: the source. Continuations end at `OutputCache.END`; those that reach the end of the source repeat
        the drafts.
        """
        most = min(most, self._max_drafts[matches.length])
        drafts, probability, score = list[int](), 1.0, 0.0
        if not most:
            return drafts, score
        known = tokens.data
        candidates = [known[place : place + most].tolist() for place in matches.places]
        if len(tokens) - max(matches.places) < most:
            candidates = [(each * most)[:most] if len(each) < most else each for each in candidates]
        while len(drafts) < most:
            if candidates.count(candidates[0]) == len(candidates):
                rest = candidates[0][len(drafts) :]
                rest = rest[: rest.index(END)] if END in rest else rest
                for _ in rest:
                    score += probability
                return drafts + rest, score
            offset = len(drafts)
            column = [each[offset] for each in candidates]
            draft = max(column, key=column.count)
            num_equal = column.count(draft)
            probability *= num_equal / len(column)
            if draft == END or probability < self._min_probability:
                break
            drafts.append(draft)
            score += probability
            if num_equal < len(column):
                candidates = [each for each in candidates if each[offset] == draft]
        return drafts, score


DRAFTERS: dict[str, Callable[[SpeculativeConfig, SlotTables], Drafter]] = {
    "ngram": lambda config, tables: NgramDrafter(tables, config.prompt_lookup_min, config.prompt_lookup_max),
    "suffix": SuffixDrafter,
}
"""Drafters without a model, by `SpeculativeConfig.method`."""
