"""Structured outputs: a grammar matcher per slot determines the allowed next tokens.

    step N            layers ─────────────── logits ── draw
                      ┊                                  │ tokens
    step N + 1        ▼  layers ─────────────── logits ──┊── draw
    thread               advance by the tokens, make masks ▲

A thread makes a step's masks while its layers are computed. They depend on the tokens of the previous step and are
needed at the draw. A matcher's state follows from the request's outputs. So a request that is admitted again, after
preemption or on another executor, continues at the same state. Matchers of the same grammar are copies of one
compiled matcher.

A row that verifies draft tokens draws several times. Its matcher consumes the drafts to make one mask for each draw, and
is rolled back. The next step consumes the accepted tokens.

Copies of a matcher share lexer states, which are limited in number, and rejected drafts add some. A matcher that exceeds a
limit is therefore replaced by a new one, which has seen nothing but the outputs. The request fails if that one fails too.

This module owns the matchers, the masks and the thread. `quintet.executor.sampling.masks` applies masks to logits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quintet.executor.backends.platforms.cores import usable_cores
from quintet.executor.ragged import Int
from quintet.executor.sampling.masks import Masks, mask_words
from quintet.process.grammars import open_matcher, open_vocabulary
from quintet.wire.config import ModelConfig
from quintet.wire.step import NewRow

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Bits of one mask."""

MAX_KEPT = 128
"""Compiled grammars in the LRU cache."""

MAX_THREADS = 8


@dataclass(slots=True, eq=False)
class SlotGrammar:
    """The grammar state of a slot's request."""

    slot: int
    grammar: str
    num_prompt: int
    outputs: list[int]
    """Outputs known to the host."""
    other_ends: list[int]
    """Stop token ids other than end-of-sequence tokens."""
    ignores_eos: bool
    matcher: LLMatcher | None = None
    """None before the first mask."""
    is_alone: bool = False
    """The matcher shares no lexer states with others, and has consumed outputs only."""
    num_consumed: int = 0
    has_ended: bool = False
    """An end token was drawn; nothing may follow."""
    has_failed: bool = False
    """The grammar exceeded a limit or allows no token: the request ends with an error."""

    def note(self, position: int, token: int) -> None:
        """Append the token drawn at ``position``. A repeated draw gives the same token and is ignored."""
        if position - self.num_prompt == len(self.outputs):
            self.outputs.append(token)

    def fail(self, reason: str) -> None:
        """End the request with an error at its next token."""
        if not self.has_failed:
            self.has_failed = True
            log.warning("structured output failed, the request ends with an error: %s", reason)

    def is_end(self, token: int, eos: Collection[int]) -> bool:
        """Return whether the token may end the output."""
        return token in eos or token in self.other_ends


@dataclass(slots=True, eq=False)
class MaskedRow:
    """The draws of a row with structured outputs in one step."""

    grammar: SlotGrammar
    position: int
    """Position of the first draw."""
    index: int
    """Index of the first draw among those of the step."""
    drafts: list[int] = field(default_factory=list)
    """The draft token after each draw but the last."""
    num_tried: int = 0
    """Drafts that the matcher has consumed for this step."""
    failure: tuple[int, str] | None = None
    """The draw at which the grammar fails, and the reason."""

    @property
    def matcher(self) -> LLMatcher:
        assert self.grammar.matcher is not None
        return self.grammar.matcher

    def note(self, tokens: Sequence[int]) -> None:
        """Append the drawn tokens to the outputs, up to the first that differs from the draft after it."""
        for offset, draft in enumerate([*self.drafts, None]):
            token = tokens[self.index + offset]
            self.grammar.note(self.position + offset, token)
            if self.failure is not None and self.failure[0] == offset:
                self.grammar.fail(self.failure[1])
            if token != draft:
                return


@dataclass(slots=True)
class StepMasks:
    """The masks of one step, computed in the thread."""

    rows: list[MaskedRow]
    _made: Future[Masks]

    def wait(self) -> Masks:
        """Block until the masks are ready and return them."""
        return self._made.result()

    def failed(self, sampling: Int) -> bytes:
        """Return the failed rows in the format of `StepResult.failed`. sampling: the rows that draw."""
        self._made.result()
        indexes = [row.index for row in self.rows if row.grammar.has_failed]
        return sampling[indexes].astype(np.int32).tobytes() if indexes else b""

    def note(self, tokens: Sequence[int]) -> None:
        """Append the drawn tokens to the matchers' outputs. tokens: of all rows that draw in the step."""
        for row in self.rows:
            row.note(tokens)


@dataclass(slots=True)
class _Library:
    """Resources opened at the first structured output."""

    vocabulary: LLTokenizer
    executor: LLExecutor
    words: NDArray[np.uint32]
    """Mask words shared by all steps: a row for each draw of each slot."""
    kept: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)


class Grammars:
    """The grammars of a worker's slots."""

    def __init__(
        self,
        max_num_seqs: int,
        model: ModelConfig,
        open_library: Callable[[ModelConfig], LLTokenizer] = open_vocabulary,
        *,
        max_drafts: int = 0,
    ) -> None:
        """max_drafts: maximum draft tokens of a row."""
        self._max_num_seqs = max_num_seqs
        self._max_draws = 1 + max_drafts
        self._model = model
        self._open = open_library
        self._by_slot: dict[int, SlotGrammar] = {}
        self._eos = frozenset(model.eos_token_ids)

    def admit(self, row: NewRow) -> bool:
        """Register the grammar of a slot's new request; return whether it has one."""
        self._by_slot.pop(row.slot, None)
        form = row.params.structured_outputs
        if form is None:
            return False
        outputs = np.frombuffer(row.token_ids, np.int32)[row.num_prompt_tokens :].tolist()
        self._by_slot[row.slot] = SlotGrammar(
            row.slot,
            form.compiled,
            row.num_prompt_tokens,
            outputs,
            [token for token in row.stop_ids if token not in self._eos],
            row.params.ignore_eos,
        )
        self._thread.submit(self._matcher, form.compiled)  # while its prompt is computed
        return True

    def begin(
        self, slots: Int, positions: Int, which: Int, token_ids: NDArray[np.int32] | None = None
    ) -> StepMasks:
        """Start to make masks for the draws ``which`` of a step. Their matchers must know all tokens before the first
        draw of each slot.

        slots, positions: int64[S], of all draws. token_ids: of every slot, with the drafts of rows that draw several times.
        """
        rows: list[MaskedRow] = []
        columns = (slots[which].tolist(), positions[which].tolist(), which.tolist())
        for slot, position, index in zip(*columns, strict=True):
            if rows and rows[-1].grammar.slot == slot:
                assert token_ids is not None, "several draws of a slot need drafts"
                rows[-1].drafts.append(int(token_ids[slot, position - 1]))
            else:
                rows.append(MaskedRow(self._by_slot[slot], position, index))
        return StepMasks(rows, self._thread.submit(self._make, rows, len(slots)))

    def end(self, slot: int) -> None:
        """Note that the request of a slot ended. Steps in flight keep its grammar."""
        self._by_slot.pop(slot, None)

    @property
    def is_used(self) -> bool:
        """True if a slot has a grammar."""
        return bool(self._by_slot)

    def forced(self, slot: int) -> list[int] | None:
        """Return the tokens that the grammar of a slot forces next, before an end; None without a grammar.

        Like `num_allowed`, not while masks of the slot are made.
        """
        grammar = self._by_slot.get(slot)
        if grammar is None:
            return None
        matcher = self._current(grammar)
        return [] if matcher is None else self._before_end(grammar, matcher.compute_ff_tokens())

    def num_allowed(self, slot: int, drafts: list[int]) -> int:
        """Return how many of these drafts the grammar of a slot allows, before an end."""
        grammar = self._by_slot[slot]
        matcher = self._current(grammar)
        return 0 if matcher is None else matcher.validate_tokens(self._before_end(grammar, drafts))

    def _before_end(self, grammar: SlotGrammar, tokens: list[int]) -> list[int]:
        ends = (index for index, token in enumerate(tokens) if grammar.is_end(token, self._eos))
        return tokens[: next(ends, len(tokens))]

    def _current(self, grammar: SlotGrammar) -> LLMatcher | None:
        """Return the matcher at the end of the outputs; None if it does not exist yet, or no token may follow."""
        if grammar.matcher is None or grammar.has_failed:
            return None
        matcher = self._advance(grammar)
        grammar.is_alone = False
        return None if grammar.has_ended or matcher.is_error() else matcher

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")

    @cached_property
    def _library(self) -> _Library:
        from llguidance import LLExecutor

        vocabulary = self._open(self._model)
        threads = min(MAX_THREADS, usable_cores())
        words = mask_words(self._max_num_seqs * self._max_draws, vocabulary.vocab_size)
        return _Library(vocabulary, LLExecutor(num_threads=threads), words)

    def _make(self, rows: list[MaskedRow], num_draws: int) -> Masks:
        """Advance the matchers and make the masks of their draws; runs in the thread."""
        masks = Masks(self._library.words, np.full(num_draws, -1))
        for row in rows:
            grammar = row.grammar
            assert row.position == grammar.num_prompt + len(grammar.outputs), (
                row.position,
                len(grammar.outputs),
            )
            self._advance(grammar)
        drawing, draw = rows, 0
        while drawing:
            self._fill(drawing, draw, masks)
            drawing = [row for row in drawing if self._try_draft(row, draw, masks)]
            draw += 1
        for row in rows:
            if row.num_tried and not row.matcher.rollback(row.num_tried):
                self._replay(row, 0)  # an error is final
        return masks

    def _fill(self, rows: list[MaskedRow], draw: int, masks: Masks) -> None:
        """Make the mask of one draw of each row, after the drafts that its matcher has consumed."""
        words = masks.words
        for row in rows:
            masks.rows[row.index + draw] = row.grammar.slot * self._max_draws + draw
        self._compute_masks(rows, draw, masks)
        stuck = [row for row in rows if _is_stuck(row.matcher, words[masks.rows[row.index + draw]])]
        stuck = [row for row in stuck if not (row.grammar.is_alone or row.grammar.has_failed)]
        if stuck:
            for row in stuck:
                self._replay(row, draw)
            self._compute_masks(stuck, draw, masks)
        for row in rows:
            self._settle(row, draw, words[masks.rows[row.index + draw]])

    def _compute_masks(self, rows: list[MaskedRow], draw: int, masks: Masks) -> None:
        words = masks.words
        running = [(row.matcher, int(masks.rows[row.index + draw])) for row in rows]
        self._library.executor.unsafe_compute_mask_ptr(
            running, words.ctypes.data, words.shape[1] * words.itemsize, len(words)
        )

    def _try_draft(self, row: MaskedRow, draw: int, masks: Masks) -> bool:
        """Consume the draft after a draw. Return False if there is none, or the draw's mask excludes it."""
        grammar = row.grammar
        if draw == len(row.drafts) or row.failure is not None or grammar.has_ended:
            return False
        draft, words = row.drafts[draw], masks.words[masks.rows[row.index + draw]]
        if grammar.is_end(draft, self._eos) or not words[draft >> 5] >> np.uint32(draft & 31) & 1:
            return False
        row.matcher.consume_token(draft)  # an error shows at the next mask
        row.num_tried += 1
        grammar.is_alone = False
        return True

    def _replay(self, row: MaskedRow, draw: int) -> None:
        """Replace a matcher that failed by a new one, with the masks that it makes without other requests and drafts."""
        grammar, library = row.grammar, self._library
        library.kept.pop(grammar.grammar, None)
        matcher = grammar.matcher = open_matcher(library.vocabulary, grammar.grammar)
        grammar.num_consumed, grammar.has_ended = 0, False
        self._advance(grammar, with_masks=True)
        for draft in row.drafts[:draw]:
            matcher.compute_bitmask()
            matcher.consume_token(draft)
        grammar.is_alone = True

    def _advance(self, grammar: SlotGrammar, *, with_masks: bool = False) -> LLMatcher:
        """Return a slot's matcher, advanced to the end of its outputs. with_masks: also compute the mask of each output."""
        matcher = grammar.matcher
        if matcher is None:
            matcher = grammar.matcher = self._matcher(grammar.grammar)
            grammar.num_consumed, grammar.has_ended = 0, False
        for token in grammar.outputs[grammar.num_consumed :]:
            if grammar.has_ended or (grammar.is_end(token, self._eos) and matcher.is_accepting()):
                grammar.has_ended = True
            else:
                if with_masks:
                    matcher.compute_bitmask()
                matcher.consume_token(token)
        grammar.num_consumed = len(grammar.outputs)
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        library = self._library
        kept = library.kept
        if grammar not in kept:
            kept[grammar] = open_matcher(library.vocabulary, grammar)
            if len(kept) > MAX_KEPT:
                kept.popitem(last=False)
        kept.move_to_end(grammar)
        return kept[grammar].deep_copy()

    def _settle(self, row: MaskedRow, draw: int, words: Words) -> None:
        """Adjust a mask for stop tokens: allow them at a complete output, and nothing else after an end or a failure."""
        grammar, matcher = row.grammar, row.matcher
        if not grammar.has_failed and _is_stuck(matcher, words):
            reason = " ".join(matcher.get_error().split("<")[0].split()) or "the grammar allows no token"
            row.failure = draw, reason
            if draw == 0:
                grammar.fail(reason)
        if grammar.has_ended or grammar.has_failed or row.failure is not None:
            words[:] = 0
            _set(words, self._eos)
            _set(words, grammar.other_ends)
            return
        if grammar.other_ends and matcher.is_accepting():
            _set(words, grammar.other_ends)
        if grammar.ignores_eos and not matcher.is_stopped():
            for token in self._eos:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))


def _is_stuck(matcher: LLMatcher, words: Words) -> bool:
    """Return whether the grammar exceeded a limit or allows no token."""
    return matcher.is_error() or not words.any()


def _set(words: Words, tokens: Collection[int]) -> None:
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
