"""Encoding of long texts in pieces, cut where the ids of the pieces are equal to the ids of the whole text.

The tokenizers library uses about 150 bytes of memory per byte of text, so a large text takes gigabytes.

* Byte-level tokenizers first split a text by a regular expression, and no token crosses such a border
  (`expressions.py`). Cuts within long words are checked by the ids on both sides (`word_cuts.py`).
* SentencePiece writes a space as U+2581. Its models treat a text as one word, or split before each U+2581. Without the
  split, a cut between a letter and U+2581 is safe for BPE if no token has a letter followed by U+2581. Then the merges
  on the two sides are independent. The vocabulary is checked once.
* Unigram models without the split are not cut: they compare sums of scores, which round differently in a piece.

Other tokenizers, and texts without such positions, encode the whole text at once.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from string import ascii_letters

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

from quintet.tokenizer_proc.expressions import (
    APART,
    BORDER,
    DEEPSEEK,
    EXPRESSIONS,
    GPT2,
    Expression,
)
from quintet.tokenizer_proc.word_cuts import Cut, WordRuns, encoded, runs_of

PIECE_CHARS = 1 << 17

_DIGITS = re.compile("[0-9]+")
_SPACED = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""
_ACROSS = re.compile(f"[A-Za-z]{SPACE}")


class _Pattern(msgspec.Struct, frozen=True):
    regex: str | None = msgspec.field(default=None, name="Regex")
    string: str | None = msgspec.field(default=None, name="String")


class _Step(msgspec.Struct):
    type: str
    use_regex: bool = True
    add_prefix_space: bool = False
    pattern: _Pattern = _Pattern()
    behavior: str = ""
    invert: bool = False
    content: str = ""
    prepend: str = ""
    replacement: str = ""
    split: bool = True
    pretokenizers: list[_Step] = []
    normalizers: list[_Step] = []


@dataclass(frozen=True, slots=True)
class Cutter:
    """Encodes texts in pieces without changing the ids."""

    tokenizer: Tokenizer
    border: re.Pattern[str]
    """Zero-width match at positions where a text may be cut."""
    digits: int | None = None
    """Digits per word; None if unknown or unlimited."""
    runs: WordRuns | None = None
    drops_space: bool = False
    """The tokenizer prepends a space to every text, so the leading space of a piece is removed."""
    added: tuple[str, ...] = ()
    """Added tokens, which are matched before the split and must not be cut."""

    def ids_of(self, text: str, num_chars: int = PIECE_CHARS) -> array[int]:
        """Return a text's ids, encoded in pieces of about ``num_chars``, or longer if no cut is possible."""
        ids, begin, expected_ids = array("i"), 0, list[int]()
        while begin < len(text):
            end, cut = len(text), None
            if end - begin > num_chars:
                near = begin + num_chars
                border = self._border_in(text, near, near + num_chars // 4) or self._between_digits(
                    text, begin, near
                )
                cut = self._cut_of_a_run(text, begin, near) if border is None else None
                if cut is None:
                    end = border or self._border_in(text, near, end) or end
            if cut is None:
                piece = encoded(self.tokenizer, text[begin + (self.drops_space and begin > 0) : end])
            else:
                piece, end = cut.ids, cut.at
            if piece[: len(expected_ids)] != expected_ids:
                return array("i", encoded(self.tokenizer, text))
            ids.extend(piece)
            begin, expected_ids = end, cut.next_ids if cut else []
        return ids

    def _border_in(self, text: str, begin: int, end: int) -> int | None:
        borders = (match.start() for match in self.border.finditer(text, begin, end))
        return next((at for at in borders if self._is_clear(text, at)), None)

    def _between_digits(self, text: str, begin: int, at: int) -> int | None:
        """Return the last border between two words of digits at or before ``at``; None without one."""
        if self.digits is None or not _DIGITS.fullmatch(text, at - 1, at + 1):
            return None
        digits = _DIGITS.match(text[begin:at][::-1])
        first = at - len(digits[0]) if digits else at
        if first > begin and text[first - 1].isnumeric():
            return None  # also a digit for the expression, so words may begin at other positions
        at -= (at - first) % self.digits
        return at if at > first and self._is_clear(text, at) else None

    def _cut_of_a_run(self, text: str, begin: int, near: int) -> Cut | None:
        if self.runs is None:
            return None
        for end in range(near, begin + (near - begin) // 2, -self.runs.reach):
            if self.runs.is_around(text, begin, end):
                cut = self.runs.cut(text, begin, end)
                if cut is not None and self._is_clear(text, cut.at):
                    return cut
        return None

    def _is_clear(self, text: str, at: int) -> bool:
        """Return whether no added token is near a position."""
        reach = max(map(len, self.added), default=0)
        window = text[max(0, at - reach) : at + reach]
        normalizer = self.tokenizer.normalizer
        normal = window if normalizer is None else normalizer.normalize_str(window)
        return not any(content in window or content in normal for content in self.added)


def cutter_of(tokenizer: Tokenizer) -> Cutter | None:
    """Return the cutter of a tokenizer; None if its texts must be encoded whole."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    try:
        steps = [
            None if part is None else msgspec.json.decode(part.__getstate__(), type=_Step)
            for part in (normalizer, splitter)
        ]
    except (msgspec.ValidationError, TypeError):
        return None  # unsupported tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    contents = tuple(token.content for token in added)
    normalizer_step, splitter_step = steps
    if _keeps_borders(normalizer_step) and splitter_step is not None:
        known = _expression_of(splitter_step)
        if known is not None:
            expression, is_alone = known
            return Cutter(
                tokenizer,
                BORDER,
                expression.digits if is_alone else None,
                runs_of(tokenizer, expression) if is_alone else None,
                added=contents,
            )
    writing = _spaces_written_by(normalizer_step, splitter_step)
    if writing is None or not (writing.splits or _merges_within_borders(tokenizer)):
        return None
    return Cutter(tokenizer, _SPACED, drops_space=writing.prepends, added=contents)


@dataclass(frozen=True, slots=True)
class _Writing:
    """Conversion of spaces to `SPACE`."""

    prepends: bool
    """One is prepended to every text, even if it begins with a space."""
    splits: bool
    """Each begins a new word."""


def _spaces_written_by(normalizer: _Step | None, splitter: _Step | None) -> _Writing | None:
    """Return the conversion of spaces of a SentencePiece-like tokenizer; None if it has other or further steps."""
    if normalizer is None:
        is_metaspace = splitter is not None and (splitter.type, splitter.replacement) == ("Metaspace", SPACE)
        return _Writing(prepends=False, splits=splitter.split) if is_metaspace and splitter else None
    steps = normalizer.normalizers if normalizer.type == "Sequence" else [normalizer]
    match steps:
        case [_Step(type="Prepend", prepend=prefix), last] if prefix == SPACE:
            prepends = True
        case [last]:
            prepends = False
        case _:
            return None
    if (last.type, last.pattern.string, last.content) != ("Replace", " ", SPACE):
        return None
    if splitter is not None and (splitter.type, splitter.pattern.string) != ("Split", " "):
        return None
    return _Writing(prepends=prepends, splits=False)  # no space is left to split at


def _merges_within_borders(tokenizer: Tokenizer) -> bool:
    """Return whether the model never merges across a border, and has tokens for the characters next to it."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout or model.ignore_merges:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return all(sign in vocabulary for sign in ascii_letters + SPACE) and not _ACROSS.search(
        "\n".join(vocabulary)
    )


def _keeps_borders(normalizer: _Step | None) -> bool:
    """Return whether normalization of pieces equals that of the text: composition never joins across a border."""
    if normalizer is None:
        return True
    if normalizer.type == "Sequence":
        return all(map(_keeps_borders, normalizer.normalizers))
    return normalizer.type in {"NFC", "NFKC"}


def _expression_of(step: _Step) -> tuple[Expression, bool] | None:
    """Return the expression that splits a text, and whether it is the only split; None if unknown."""
    match step:
        case _Step(type="Sequence", pretokenizers=[digits, cjk, words, *others]) if _are_deepseek(
            digits, cjk, words
        ):
            return _expression_of(_Step("Sequence", pretokenizers=[words, *others]))
        case _Step(type="Sequence", pretokenizers=[first, *others]):
            # Later steps split within the words of the first step.
            known = _expression_of(first)
            if any(
                other.type not in {"Split", "ByteLevel", "Digits"} or other.add_prefix_space
                for other in others
            ):
                return None
            return (
                (
                    known[0],
                    known[1] and all(other.type == "ByteLevel" and not other.use_regex for other in others),
                )
                if known
                else None
            )
        case _Step(type="ByteLevel", use_regex=True, add_prefix_space=False):
            return GPT2, True
        case _Step(type="Split", pattern=_Pattern(regex=str(words)), behavior="Isolated", invert=False):
            expression = EXPRESSIONS.get(words)
            return None if expression is None else (expression, True)
    return None


def _are_deepseek(*steps: _Step) -> bool:
    regexes = tuple(step.pattern.regex for step in steps)
    return regexes == (*APART, DEEPSEEK) and all(step.behavior == "Isolated" for step in steps)
