"""Structured outputs: a matcher per slot, which says what its tenant may draw next.

    step N            layers ─────────────── logits ── draw
                      ┊                                  │ tokens
    step N + 1        ▼  layers ─────────────── logits ──┊── draw
    thread               advance by the tokens, make masks ▲

Masks of a step are made while its layers are computed: they depend on what the step before drew, and are needed when this one
draws. A matcher knows the outputs that it was told of, and nothing else: a request that enters again, after preemption, in
another executor, brings its outputs, and is where it was. Matchers of the same grammar are copies of one.

Owns the matchers, the masks and the thread. Knows nothing of logits: see `quintet.executor.sampling.masks`.
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
"""Grammars whose matchers are kept for the next request that asks for the same."""

MAX_THREADS = 8


@dataclass(slots=True, eq=False)
class SlotGrammar:
    """A slot's request, as far as its form is concerned."""

    slot: int
    grammar: str
    num_prompt: int
    outputs: list[int]
    """Those that it is known to have."""
    other_ends: list[int]
    """Tokens that end it, besides the ends of sequence."""
    ignores_eos: bool
    matcher: LLMatcher | None = None
    """None until the first mask."""
    num_consumed: int = 0
    has_ended: bool = False
    """An end was drawn: nothing else can follow."""
    has_failed: bool = False
    """The grammar needs more than it may, or leaves nothing to draw: it ends here, and its answer is none."""

    def note(self, position: int, token: int) -> None:
        """Remember what was drawn for this position of the sequence. Drawn again, it is the same."""
        if position - self.num_prompt == len(self.outputs):
            self.outputs.append(token)


@dataclass(slots=True)
class StepMasks:
    """The masks of one step, being made."""

    tenants: list[tuple[SlotGrammar, int, int]]
    """SlotGrammar, the position its token will have, and which of the step's drawn tokens is its."""
    _made: Future[Masks]

    def wait(self) -> Masks:
        """Return the masks once they are there."""
        return self._made.result()

    def failed(self, sampling: Int) -> bytes:
        """Return which rows cannot go on, as `StepResult.failed` has it. sampling: the rows that draw."""
        self._made.result()
        indexes = [index for tenant, _, index in self.tenants if tenant.has_failed]
        return sampling[indexes].astype(np.int32).tobytes() if indexes else b""

    def note(self, tokens: Sequence[int]) -> None:
        """Tell the matchers what was drawn. tokens: of all rows that draw in the step."""
        for tenant, position, index in self.tenants:
            tenant.note(position, tokens[index])


@dataclass(slots=True)
class _Library:
    """What is opened when the first structured output comes."""

    vocabulary: LLTokenizer
    executor: LLExecutor
    words: NDArray[np.uint32]
    """Of the masks of every step."""
    kept: OrderedDict[str, LLMatcher] = field(default_factory=OrderedDict)


class Grammars:
    """One per worker."""

    def __init__(
        self,
        max_num_seqs: int,
        model: ModelConfig,
        open_library: Callable[[ModelConfig], LLTokenizer] = open_vocabulary,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._model = model
        self._open = open_library
        self._tenants: dict[int, SlotGrammar] = {}
        self._eos = frozenset(model.eos_token_ids)

    def admit(self, row: NewRow) -> bool:
        """Remember what a slot's new tenant must write; return whether that is anything."""
        self._tenants.pop(row.slot, None)
        wanted = row.params.structured_outputs
        if wanted is None:
            return False
        outputs = np.frombuffer(row.token_ids, np.int32)[row.num_prompt_tokens :].tolist()
        self._tenants[row.slot] = SlotGrammar(
            row.slot,
            wanted.compiled,
            row.num_prompt_tokens,
            outputs,
            [token for token in row.stop_ids if token not in self._eos],
            row.params.ignore_eos,
        )
        self._thread.submit(self._matcher, wanted.compiled)  # while its prompt is computed
        return True

    def begin(self, slots: Int, positions: Int, which: Int) -> StepMasks:
        """Begin to make the masks of the rows ``which`` of a step, whose matchers know all tokens before ``positions``.

        slots, positions: int64[S], of all rows that draw. Earlier masks of these slots are overwritten, and no others.
        """
        tenants = [
            (self._tenants[slot], position, index)
            for slot, position, index in zip(
                slots[which].tolist(), positions[which].tolist(), which.tolist(), strict=True
            )
        ]
        return StepMasks(tenants, self._thread.submit(self._make, tenants))

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

    def _make(self, tenants: list[tuple[SlotGrammar, int, int]]) -> Masks:
        """Advance the matchers and make their masks; runs in the thread."""
        library = self._library
        masks = Masks(library.words)
        running: list[tuple[LLMatcher, int]] = []
        for tenant, position, _ in tenants:
            assert position == tenant.num_prompt + len(tenant.outputs), (position, len(tenant.outputs))
            matcher = self._advance(tenant)
            running.append((matcher, tenant.slot))
            masks.used[tenant.slot] = 1
        words = masks.words
        library.executor.unsafe_compute_mask_ptr(
            running, words.ctypes.data, words.shape[1] * words.itemsize, len(words)
        )
        for tenant, _, _ in tenants:
            self._settle(tenant, words[tenant.slot])
        return masks

    def _advance(self, tenant: SlotGrammar) -> LLMatcher:
        """Return a tenant's matcher, at the end of its outputs."""
        matcher = tenant.matcher
        if matcher is None:
            matcher = tenant.matcher = self._matcher(tenant.grammar)
        for token in tenant.outputs[tenant.num_consumed :]:
            is_end = token in self._eos or token in tenant.other_ends
            if tenant.has_ended or (is_end and matcher.is_accepting()):
                tenant.has_ended = True
            else:
                matcher.consume_token(token)
        tenant.num_consumed = len(tenant.outputs)
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

    def _settle(self, tenant: SlotGrammar, words: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        """Let a tenant end, where its outputs are a whole answer, by what ends it, and by nothing else."""
        matcher = tenant.matcher
        assert matcher is not None
        if not tenant.has_failed and (matcher.is_error() or not words.any()):
            tenant.has_failed = True
            reason = " ".join(matcher.get_error().split("<")[0].split()) or "no token is left to draw"
            log.warning("an answer with a form cannot go on, and ends with an error: %s", reason)
        if tenant.has_ended or tenant.has_failed:
            words[:] = 0
            _set(words, self._eos)
            _set(words, tenant.other_ends)
            return
        if tenant.other_ends and matcher.is_accepting():
            _set(words, tenant.other_ends)
        if tenant.ignores_eos and not matcher.is_stopped():
            for token in self._eos:
                words[token >> 5] &= ~np.uint32(1 << (token & 31))


def _set(words: np.ndarray[tuple[int], np.dtype[np.uint32]], tokens: Sequence[int] | frozenset[int]) -> None:
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
