"""Cuts within a word: where the ids of two parts of a word are those of the whole.

A text without borders (`pieces.py`) is one word, or few: digits, Chinese, emoji, one letter a million times. BPE merges a word
by rank, leftmost first. Of tokens that it leaves side by side each two are also what it makes of their two texts alone: nothing
was merged across the borders of the two, so what happened between these did not depend on the rest. And the other way round:
tokens of which each two neighbours are what BPE makes of their two texts are what it makes of all of it, as the first merge
across one of their borders would have happened between the two alone as well. (The argument is that of compatible pairs in
Berglund and van der Merwe, "Formalizing BPE Tokenization", 2023.) So two parts that were encoded apart may be put together where
the last token of the one and the first of the other keep apart when they are encoded together.

What splits a text into words must see the parts as it saw the whole. It does in the midst of a *run*: characters of a kind that
every expression in use takes as many of as there are, wherever it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split

from quintet.tokenizer_proc.expressions import Beginning, Expression, without_marks

REACH = 256
"""Characters of one kind that must be on either side of where a piece ends: longer than nearly all tokens."""

MAX_TRIES = 64
"""Places before where a piece ends that are looked at."""


class Cut(NamedTuple):
    """Where a word may be cut if what follows begins as foreseen."""

    at: int
    """In characters of the text."""
    ids: list[int]
    """Of the piece before it."""
    next_ids: list[int]
    """What the ids of the rest must begin with."""


@dataclass(frozen=True, slots=True)
class WordRuns:
    """Cuts words of a byte-level BPE tokenizer."""

    tokenizer: Tokenizer
    beginnings: tuple[Beginning, ...]
    kinds: Split
    """Leaves a run whole, and any other character by itself."""
    reach: int = REACH

    def is_around(self, text: str, begin: int, at: int) -> bool:
        """Whether a place lies in the midst of a run, and its word begins where it would if the text ended there.

        ``begin`` is where a piece begins before it.
        """
        window = text[at - self.reach : at + self.reach]
        if (
            at - begin < self.reach
            or len(window) < 2 * self.reach
            or len(self.kinds.pre_tokenize_str(window)) > 1
        ):
            return False
        normalizer = self.tokenizer.normalizer
        if normalizer is not None and normalizer.normalize_str(window) != window:
            return False
        if window[0].isspace():
            # Spaces go with line breaks before them, and line breaks with signs: neither may be near.
            before = text[begin:at].rstrip(window[0])[-1:]
            return not before or (before.isascii() and before.isalnum())
        for word in self.beginnings:
            run = word.run.match(text[begin:at][::-1])
            if run is not None:
                return word.before.fullmatch(text[begin : at - len(run[0])][-1:]) is not None
        return True

    def cut(self, text: str, begin: int, end: int) -> Cut | None:
        """Return where to cut the run around ``end``, at it or a little before; None where no place is found."""
        ids = encoded(self.tokenizer, text[begin:end])
        window = text[end - self.reach : end + self.reach]
        at, num_ids = self.reach, len(ids)
        for _ in range(MAX_TRIES):
            last = self._whole_characters(ids[max(0, num_ids - self.reach) : num_ids][::-1], window[:at], -1)
            if last is None:
                return None
            first_ids = self._first_behind(window, at, ids[num_ids - last.num_ids : num_ids], last.num_chars)
            if first_ids is not None:
                return Cut(end - self.reach + at, ids[:num_ids], first_ids)
            at -= last.num_chars
            num_ids -= last.num_ids
        return None

    def _first_behind(self, window: str, at: int, last_ids: list[int], num_last: int) -> list[int] | None:
        """Return the first ids behind a place, if they keep apart from the last ones before it."""
        ids = encoded(self.tokenizer, window[at:])
        first = self._whole_characters(ids, window[at:], 1)
        if first is None:
            return None
        first_ids = ids[: first.num_ids]
        together = encoded(self.tokenizer, window[at - num_last : at + first.num_chars])
        return first_ids if together == last_ids + first_ids else None

    def _whole_characters(self, ids: list[int], text: str, step: int) -> _Part | None:
        """Return the fewest of the ids that are whole characters of a text from its beginning (1) or, backwards, its end (-1).

        None if they are all that there is of it, or more.
        """
        written = text.encode()
        num_bytes = 0
        for num_ids, token_id in enumerate(ids, 1):
            token = self.tokenizer.id_to_token(token_id)
            num_bytes += len(token) if token else len(written)
            if num_bytes >= len(written):
                return None
            border = num_bytes if step == 1 else len(written) - num_bytes
            if written[border] & 0xC0 != 0x80:
                part = written[:border] if step == 1 else written[border:]
                return _Part(num_ids, len(part.decode()))
        return None


class _Part(NamedTuple):
    num_ids: int
    num_chars: int


def runs_of(tokenizer: Tokenizer, expression: Expression) -> WordRuns | None:
    """Return who cuts the words of a byte-level tokenizer; None where its model is none that can be cut."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not all(sign in vocabulary for sign in ByteLevel.alphabet()):
        return None
    kinds = expression.runs if tokenizer.normalizer is None else without_marks(expression.runs)
    return WordRuns(tokenizer, expression.beginnings, Split(Regex("|".join([*kinds, r"[\s\S]"])), "isolated"))


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's ids, without special tokens around it."""
    # The batch call releases the interpreter lock while it works, the single one does not.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
