"""Cuts within a word, at positions where the ids of the two parts are equal to the ids of the whole word.

A text without borders (`text_pieces.py`) has one or few words: digits, Chinese, emoji, one letter a million times. BPE
merges a word by rank, leftmost first. A token sequence is the encoding of its text if and only if each pair of adjacent
tokens is the encoding of the pair's text. The first merge across a border would also happen in the pair alone. (See
compatible pairs in Berglund and van der Merwe, "Formalizing BPE Tokenization", 2023.) So two parts encoded separately
may be concatenated if the last token of one and the first token of the other remain separate when encoded together.

The pre-tokenization must also split the parts like the whole. This holds inside a *run*: characters of one kind that
every supported expression matches greedily from any start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split

from quintet.tokenizer_proc.expressions import Beginning, Expression, without_marks

REACH = 256
"""Characters of one kind required on both sides of a cut; longer than nearly all tokens."""

MAX_TRIES = 64
"""Positions tried before the intended end of a piece."""


class Cut(NamedTuple):
    """A cut within a word; valid if the ids of the rest begin with ``next_ids``."""

    at: int
    """Position in characters of the text."""
    ids: list[int]
    """Ids of the piece before the cut."""
    next_ids: list[int]
    """Required first ids of the rest."""


@dataclass(frozen=True, slots=True)
class WordRuns:
    """Finds cuts within words for a byte-level BPE tokenizer."""

    tokenizer: Tokenizer
    beginnings: tuple[Beginning, ...]
    kinds: Split
    """Splits a text into runs and single other characters."""
    reach: int = REACH

    def is_around(self, text: str, begin: int, at: int) -> bool:
        """Return whether ``at`` is inside a run, and its word begins at the same position if the text ends at ``at``.

        ``begin`` is the start of the piece before ``at``.
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
            # Spaces join preceding line breaks, and line breaks join signs: neither may precede the run.
            before = text[begin:at].rstrip(window[0])[-1:]
            return not before or (before.isascii() and before.isalnum())
        for word in self.beginnings:
            run = word.run.match(text[begin:at][::-1])
            if run is not None:
                return word.before.fullmatch(text[begin : at - len(run[0])][-1:]) is not None
        return True

    def cut(self, text: str, begin: int, end: int) -> Cut | None:
        """Return a cut in the run around ``end``, at or shortly before ``end``; None if there is none."""
        ids = encoded(self.tokenizer, text[begin:end])
        window = text[end - self.reach : end + self.reach]
        at, num_ids = self.reach, len(ids)
        for _ in range(MAX_TRIES):
            last = self._whole_characters(ids[max(0, num_ids - self.reach) : num_ids][::-1], window[:at], -1)
            if last is None:
                return None
            first_ids = self._first_ids_after(
                window, at, ids[num_ids - last.num_ids : num_ids], last.num_chars
            )
            if first_ids is not None:
                return Cut(end - self.reach + at, ids[:num_ids], first_ids)
            at -= last.num_chars
            num_ids -= last.num_ids
        return None

    def _first_ids_after(self, window: str, at: int, last_ids: list[int], num_last: int) -> list[int] | None:
        """Return the first ids after a position, if they do not merge with the last ids before it."""
        ids = encoded(self.tokenizer, window[at:])
        first = self._whole_characters(ids, window[at:], 1)
        if first is None:
            return None
        first_ids = ids[: first.num_ids]
        together = encoded(self.tokenizer, window[at - num_last : at + first.num_chars])
        return first_ids if together == last_ids + first_ids else None

    def _whole_characters(self, ids: list[int], text: str, step: int) -> _Part | None:
        """Return the fewest ids that form whole characters, from the text's beginning (step 1) or its end (step -1).

        None if they would be the whole text.
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
    """Return the word cutter of a byte-level tokenizer; None if its model cannot be cut."""
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
    """Return a text's ids without special tokens."""
    # encode_batch_fast releases the GIL; encode does not.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
