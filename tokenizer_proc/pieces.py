"""Long texts in pieces: where a text may be cut so that its pieces' ids are those of the whole.

The library keeps some 130 bytes for each byte of a text that it encodes, so a large text is gigabytes for a moment. Byte-level
tokenizers split a text by a regular expression before anything else, and no token crosses such a border. Of the expressions in
use (below) all split between a letter and a space with a letter behind it, whatever is further to the left or right: a space
belongs to the word behind it, and an expression that matches up to there matches the same where the text ends there. So a cut
in such a place changes nothing. Texts without such places, and those of other tokenizers, are encoded whole: SentencePiece
models may have tokens across words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec
from tokenizers import Tokenizer

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


class _Pattern(msgspec.Struct):
    regex: str | None = msgspec.field(default=None, name="Regex")


class _Step(msgspec.Struct):
    type: str
    use_regex: bool = True
    add_prefix_space: bool = False
    pattern: _Pattern | None = None
    behavior: str = ""
    invert: bool = False
    pretokenizers: list[_Step] = []
    normalizers: list[_Step] = []


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Return whether texts may be encoded in the pieces that `pieces_of` makes."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    try:
        steps = [
            None if part is None else msgspec.json.decode(part.__getstate__(), type=_Step)
            for part in (normalizer, splitter)
        ]
    except (msgspec.ValidationError, TypeError):
        return False  # nothing that is known here
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        _keeps_borders(steps[0])
        and steps[1] is not None
        and _splits_at_borders(steps[1])
        and not any(token.lstrip or token.rstrip or _WITHIN.search(token.content) for token in added)
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


def pieces_of(text: str, num_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the text in pieces of about so many characters, or more where it may not be cut."""
    cuts = [0]
    while len(text) - cuts[-1] > num_chars:
        border = _BORDER.search(text, cuts[-1] + num_chars)
        if border is None:
            break
        cuts.append(border.start())
    for begin, end in pairwise([*cuts, len(text)]):
        yield text[begin:end]
