"""Structured outputs: a grammar matcher per slot determines the allowed next tokens.

    step N            layers ─────────────── logits ── draw
                      ┊                                  │ tokens
    step N + 1        ▼  layers ─────────────── logits ──┊── draw
    thread               advance by the tokens, make masks ▲

A thread makes a step's masks while its layers are computed. They depend on the tokens of the previous step and are
needed at the draw. A matcher's state follows from the request's outputs. So a request that is admitted again, after
preemption or on another executor, continues at the same state. Matchers of the same grammar are copies of one
compiled matcher.

This module owns the matchers, the masks and the thread. `quintet.executor.sampling.masks` applies masks to logits.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int
from quintet.executor.sampling.masks import Masks, mask_words
from quintet.process.grammars import open_matcher, open_vocabulary
from quintet.wire.config import ModelConfig
from quintet.wire.step import NewRow

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

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
    num_consumed: int = 0
    has_ended: bool = False
    """An end token was drawn; nothing may follow."""
    has_failed: bool = False
    """The grammar exceeded a limit or allows no token: the request ends with an error."""

    def note(self, position: int, token: int) -> None:
        """Append the token drawn at ``position``. A repeated draw gives the same token and is ignored."""
        if position - self.num_prompt == len(self.outputs):
            self.outputs.append(token)


@dataclass(slots=True)
class StepMasks:
    """The masks of one step, computed in the thread."""

    entries: list[tuple[SlotGrammar, int, int]]
    """For each masked row: its grammar, the position of its token, and its index among the drawn tokens."""
    _made: Future[Masks]

    def wait(self) -> Masks:
        """Block until the masks are ready and return them."""
        return self._made.result()

    def failed(self, sampling: Int) -> bytes:
        """Return the failed rows in the format of `StepResult.failed`. sampling: the rows that draw."""
        self._made.result()
        indexes = [index for entry, _, index in self.entries if entry.has_failed]
        return sampling[indexes].astype(np.int32).tobytes() if indexes else b""

    def note(self, tokens: Sequence[int]) -> None:
        """Append the drawn tokens to the matchers' outputs. tokens: of all rows that draw in the step."""
        for entry, position, index in self.entries:
            entry.note(position, tokens[index])


@dataclass(slots=True)
class _Library:
    """Resources opened at the first structured output."""

    vocabulary: LLTokenizer
    executor: LLExecutor
    words: NDArray[np.uint32]
    """Mask words shared by all steps."""
    kept: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)


class Grammars:
    """The grammars of a worker's slots."""

    def __init__(
        self,
        max_num_seqs: int,
        model: ModelConfig,
        open_library: Callable[[ModelConfig], LLTokenizer] = open_vocabulary,
    ) -> None:
        self._max_num_seqs = max_num_seqs
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

    def begin(self, slots: Int, positions: Int, which: Int) -> StepMasks:
        """Start to make masks for the rows ``which`` of a step. Their matchers must know all tokens before ``positions``.

        slots, positions: int64[S], of all rows that draw. Overwrites the masks of these slots only.
        """
        entries = [
            (self._by_slot[slot], position, index)
            for slot, position, index in zip(
                slots[which].tolist(), positions[which].tolist(), which.tolist(), strict=True
            )
        ]
        return StepMasks(entries, self._thread.submit(self._make, entries))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")

    @cached_property
    def _library(self) -> _Library:
        from llguidance import LLExecutor

        vocabulary = self._open(self._model)
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        words = mask_words(self._max_num_seqs, vocabulary.vocab_size)
        return _Library(vocabulary, LLExecutor(num_threads=threads), words)

    def _make(self, entries: list[tuple[SlotGrammar, int, int]]) -> Masks:
        """Advance the matchers and make their masks; runs in the thread."""
        library = self._library
        masks = Masks(library.words)
        running: list[tuple[LLMatcher, int]] = []
        for entry, position, _ in entries:
            assert position == entry.num_prompt + len(entry.outputs), (position, len(entry.outputs))
            matcher = self._advance(entry)
            running.append((matcher, entry.slot))
            masks.used[entry.slot] = 1
        words = masks.words
        library.executor.unsafe_compute_mask_ptr(
            running, words.ctypes.data, words.shape[1] * words.itemsize, len(words)
        )
        for entry, _, _ in entries:
            self._settle(entry, words[entry.slot])
        return masks

    def _advance(self, entry: SlotGrammar) -> LLMatcher:
        """Return a slot's matcher, advanced to the end of its outputs."""
        matcher = entry.matcher
        if matcher is None:
            matcher = entry.matcher = self._matcher(entry.grammar)
        for token in entry.outputs[entry.num_consumed :]:
            is_end = token in self._eos or token in entry.other_ends
            if entry.has_ended or (is_end and matcher.is_accepting()):
                entry.has_ended = True
            else:
                matcher.consume_token(token)
        entry.num_consumed = len(entry.outputs)
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

    def _settle(self, entry: SlotGrammar, words: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        """Adjust a mask for stop tokens: allow them at a complete output, and nothing else after an end or a failure."""
        matcher = entry.matcher
        assert matcher is not None
        if not entry.has_failed and (matcher.is_error() or not words.any()):
            entry.has_failed = True
            reason = " ".join(matcher.get_error().split("<")[0].split()) or "the grammar allows no token"
            log.warning("structured output failed, the request ends with an error: %s", reason)
        if entry.has_ended or entry.has_failed:
            words[:] = 0
            _set(words, self._eos)
            _set(words, entry.other_ends)
            return
        if entry.other_ends and matcher.is_accepting():
            _set(words, entry.other_ends)
        if entry.ignores_eos and not matcher.is_stopped():
            for token in self._eos:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))


def _set(words: np.ndarray[tuple[int], np.dtype[np.uint32]], tokens: Sequence[int] | frozenset[int]) -> None:
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
