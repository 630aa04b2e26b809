"""Long texts in pieces: where a text may be cut so that its pieces' ids are those of the whole.

The library keeps some 150 bytes for each byte of a text that it encodes, so a large text is gigabytes for a moment. Byte-level
tokenizers split a text by a regular expression before anything else, and no token crosses such a border (`expressions.py`).
Within long words of theirs there are other places, which the ids on either side tell (`runs.py`).

SentencePiece's way to write a space is a letter of its own, U+2581. Its models see a text as one long word, or split before each
such letter. Where they do not split, BPE still crosses no such border if no token of the vocabulary has a letter with U+2581
behind it: what is left and right of it is merged by the same merges in the same order, whatever is beyond. The vocabulary is
looked through once. Unigram models that do not split are not cut: they compare sums of all scores before a place, and in a piece
those are rounded differently. Texts without such places, and those of other tokenizers, are encoded whole.
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
"""How SentencePiece writes a space."""
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
    """Encodes texts in pieces where that changes no token."""

    tokenizer: Tokenizer
    border: re.Pattern[str]
    """Matches, without characters of its own, where a text may be cut."""
    digits: int | None = None
    """How many digits make a word; None where that is not known, or it is any number."""
    runs: WordRuns | None = None
    drops_space: bool = False
    """Whether the tokenizer writes a space before every text, so that a piece leaves its own out."""
    added: tuple[str, ...] = ()
    """The texts that are found before a text is split, which may not be cut."""

    def ids_of(self, text: str, num_chars: int = PIECE_CHARS) -> array[int]:
        """Return a text's ids, from pieces of about so many characters, or more where it may not be cut."""
        ids, begin, foreseen = array("i"), 0, list[int]()
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
            if piece[: len(foreseen)] != foreseen:
                return array("i", encoded(self.tokenizer, text))
            ids.extend(piece)
            begin, foreseen = end, cut.next_ids if cut else []
        return ids

    def _border_in(self, text: str, begin: int, end: int) -> int | None:
        borders = (match.start() for match in self.border.finditer(text, begin, end))
        return next((at for at in borders if self._is_clear(text, at)), None)

    def _between_digits(self, text: str, begin: int, at: int) -> int | None:
        """Return where two words of digits meet at a place or just before it, if there are such."""
        if self.digits is None or not _DIGITS.fullmatch(text, at - 1, at + 1):
            return None
        digits = _DIGITS.match(text[begin:at][::-1])
        first = at - len(digits[0]) if digits else at
        if first > begin and text[first - 1].isnumeric():
            return None  # it is a digit to the expression as well, so words may begin elsewhere
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
        """Whether no added token is near a place."""
        reach = max(map(len, self.added), default=0)
        window = text[max(0, at - reach) : at + reach]
        normalizer = self.tokenizer.normalizer
        normal = window if normalizer is None else normalizer.normalize_str(window)
        return not any(content in window or content in normal for content in self.added)


def cutter_of(tokenizer: Tokenizer) -> Cutter | None:
    """Return who cuts a tokenizer's texts; None where they must be encoded whole."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    try:
        steps = [
            None if part is None else msgspec.json.decode(part.__getstate__(), type=_Step)
            for part in (normalizer, splitter)
        ]
    except (msgspec.ValidationError, TypeError):
        return None  # nothing that is known here
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
    """How spaces become `SPACE`."""

    prepends: bool
    """Whether one is put before a text that begins with one too."""
    splits: bool
    """Whether each begins a word of the model's."""


def _spaces_written_by(normalizer: _Step | None, splitter: _Step | None) -> _Writing | None:
    """Return how a tokenizer in SentencePiece's way writes spaces; None where it is another's way, or does more than that."""
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
    """Whether the model merges nothing across a border, and knows what is beside one."""
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
    """Whether a text is normalised as its pieces are: composing joins nothing to a space, nor to a letter across one."""
    if normalizer is None:
        return True
    if normalizer.type == "Sequence":
        return all(map(_keeps_borders, normalizer.normalizers))
    return normalizer.type in {"NFC", "NFKC"}


def _expression_of(step: _Step) -> tuple[Expression, bool] | None:
    """Return what a text is split into words by, and whether it is by that alone; None where that is not known."""
    match step:
        case _Step(type="Sequence", pretokenizers=[digits, cjk, words, *others]) if _are_deepseek(
            digits, cjk, words
        ):
            return _expression_of(_Step("Sequence", pretokenizers=[words, *others]))
        case _Step(type="Sequence", pretokenizers=[first, *others]):
            # What others split further they split within the words of the first.
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
