"""Sources of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.memory import Bits
from quintet.executor.ragged import Int
from quintet.executor.runner import Runner
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.gram_index import RequestIndexes, Tokens, compiled_functions, grams_of
from quintet.executor.speculation.output_cache import OutputCache
from quintet.executor.speculation.step_time import StepTime
from quintet.wire.config import SpeculativeConfig
from quintet.wire.step import StepPlan

CONTEXT_TOKENS = 8
"""Tokens of the prompt that are cached before an output."""

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


class Drafter(ABC):
    """Source of draft tokens. Without a model, it needs only `propose`, and `end` and `note` for a state of its own."""

    output_cache: OutputCache | None = None
    """Outputs of earlier requests, if the drafter uses them."""
    reads_steps = False
    """True if the drafter needs `observe` and `note_computed`."""

    def __init__(self) -> None:
        self._time = StepTime()

    @property
    def step_time(self) -> tuple[float, float]:
        """Measured seconds of proposing one more token for all rows: a fixed part, and one per row. Zeros if negligible."""
        return self._time.fit()

    def end(self, slot: int, num_tokens: int) -> None:
        """Note that the request of a slot ended or was preempted, with so many known tokens. The tables still hold them."""

    def note(self, plan: StepPlan) -> None:
        """Note the deltas and rows of each plan, before `propose` for its rows. The slot tables hold the deltas."""

    def observe(self, num_tokens: int) -> Bits:
        """Return the hidden states ``[num_tokens, width]`` of the served model's last step. Its next one changes them."""
        return np.empty(0, np.int16)

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: Bits) -> None:
        """Note rows that the served model has computed in a step, or in several in a row. Columns are int64[R].

        num_valid: computed tokens of each row, without rejected drafts. hidden: of all tokens, see `observe`.
        """

    def num_missing(self, slots: Int, num_tokens: Int) -> Int | None:
        """Return the tokens that `propose` computes for each slot, besides the newest one. None if it computes none.

        num_tokens: known tokens of each slot, as in `DraftRows`.
        """
        return None

    @abstractmethod
    def propose(self, rows: DraftRows) -> list[Tokens]:
        """Return, for each row, up to ``counts`` tokens that may follow the known ones."""


class NgramDrafter(Drafter):
    """Prompt lookup: the tokens that followed the last earlier occurrence of the newest tokens.

    The longest suffix of ``prompt_lookup_max`` to ``prompt_lookup_min`` tokens that occurs earlier is used (see
    `GramIndex.find`).
    """

    def __init__(self, config: SpeculativeConfig, tables: SlotTables) -> None:
        super().__init__()
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._longest = config.prompt_lookup_max
        self._indexes = RequestIndexes(self._token_ids, grams_of(config), self._longest)

    def end(self, slot: int, num_tokens: int) -> None:
        self._indexes.drop(slot)

    def note(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._indexes.drop(new.slot)

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


class SuffixDrafter(Drafter):
    """Suffix decoding (Oliaro et al., 2024): the most frequent continuation of the longest match.

    Matches come from the request's own tokens, and from outputs of earlier requests of the same scope. The choice is
    compiled: ``csrc/cpu/ops/suffix_drafts.cpp``.
    """

    output_cache: OutputCache

    def __init__(self, config: SpeculativeConfig, tables: SlotTables) -> None:
        super().__init__()
        self._token_ids: Tokens = tables.token_ids.numpy()
        depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        grams = grams_of(config)
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


MakeDrafter = Callable[[SlotTables, Sampler], Drafter]
"""Constructor of the drafter of a draft model, with the tables and the sampler of the served model."""

DRAFTERS: dict[str, Callable[[SpeculativeConfig, SlotTables], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}
"""Drafters without a model, by `SpeculativeConfig.method`."""


def compute_and_draw(
    runner: Runner, rows: Rows, tables: SlotTables, sampler: Sampler, *, has_same_ids: bool
) -> bytes:
    """Compute the rows and draw a token where a row draws; return the tokens, int32. ``tables`` hold them too.

    A draft is likely to be accepted if it is drawn as the served model draws: with the same random number, temperature and
    filters, and with the logits processors of the request. Penalties and bad words read the drafts before it in the token table.

    runner, tables: of the draft model. sampler: of the served model. has_same_ids: the logits are those of the served model's
    tokens; otherwise its logits processors do not apply.
    """
    if has_same_ids and sampler.shapes(rows):
        runner.forward(rows, tables)
        with torch.inference_mode():  # as the served model's draws: both use one buffer
            drawn, _ = sampler.draw(rows, runner.logits(rows.draw_tokens), is_draft=True)
            tokens: Tokens = drawn.cpu().numpy()
        # The sampler's token table may be another one, on a device.
        tables.token_ids.numpy()[rows.slots[rows.sampling], rows.draw_positions] = tokens
        return tokens.tobytes()
    found = runner.forward_and_draw(rows, tables, sampler.settings, None)
    assert found is not None, "the runner of a draft model draws"
    return found
