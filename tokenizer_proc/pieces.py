"""Long texts in pieces: where a text may be cut so that its pieces' ids are those of the whole.

The library keeps some 130 bytes for each byte of a text that it encodes, so a large text is gigabytes for a moment. Byte-level
tokenizers split a text by a regular expression before anything else, and no token crosses such a border. Of the expressions in
use (below) all split between a letter and a space with a letter behind it, whatever is further to the left or right: a space
belongs to the word behind it, and an expression that matches up to there matches the same where the text ends there. So a cut
in such a place changes nothing.

SentencePiece's way to write a space is a letter of its own, U+2581. Its models see a text as one long word, or split before each
such letter. Where they do not split, BPE still crosses no such border if no token of the vocabulary has a letter with U+2581
behind it: what is left and right of it is merged by the same merges in the same order, whatever is beyond. The vocabulary is
looked through once. Unigram models that do not split are not cut: they compare sums of all scores before a place, and in a piece
those are rounded differently. Texts without such places, and those of other tokenizers, are encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_letters

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

PIECE_CHARS = 1 << 20

_BORDER = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_WITHIN = re.compile(r"[A-Za-z] ")
"""An added token that has this might lie across a border."""
_CONTRACTED = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORDS = {
    # GPT-2's own
    rf"{_CONTRACTED}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    # cl100k: GPT-4, Llama 3, Qwen 2 and 3 with digits by one or three
    rf"(?i:{_CONTRACTED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    rf"(?i:{_CONTRACTED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Expressions that split between a letter and a space with a letter behind it."""


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
    """Cuts texts where that changes no token."""

    drops_space: bool
    """Whether the tokenizer writes a space before every text, so that a piece leaves its own out."""

    def pieces_of(self, text: str, num_chars: int = PIECE_CHARS) -> Iterator[str]:
        """Yield the text in pieces of about so many characters, or more where it may not be cut."""
        cuts = [0]
        while len(text) - cuts[-1] > num_chars:
            border = _BORDER.search(text, cuts[-1] + num_chars)
            if border is None:
                break
            cuts.append(border.start())
        for begin, end in pairwise([*cuts, len(text)]):
            yield text[begin + (self.drops_space and begin > 0) : end]


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
    if any(token.lstrip or token.rstrip or _WITHIN.search(token.content) for token in added):
        return None
    normalizer_step, splitter_step = steps
    if _keeps_borders(normalizer_step) and splitter_step is not None and _splits_at_borders(splitter_step):
        return Cutter(drops_space=False)
    writing = _spaces_written_by(normalizer_step, splitter_step)
    if writing is None or not (writing.splits or _merges_within_borders(tokenizer)):
        return None
    return Cutter(drops_space=writing.prepends)


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


def _splits_at_borders(step: _Step) -> bool:
    match step:
        case _Step(type="Sequence", pretokenizers=[first, *others]):
            # What others split further they split within the pieces of the first.
            return (
                _splits_at_borders(first)
                and all(other.type in {"Split", "ByteLevel", "Digits"} for other in others)
                and not any(other.add_prefix_space for other in others)
            )
        case _Step(type="ByteLevel"):
            return step.use_regex and not step.add_prefix_space
        case _Step(type="Split", pattern=_Pattern(regex=str(words)), behavior="Isolated", invert=False):
            return words in _WORDS
        case _:
            return False
