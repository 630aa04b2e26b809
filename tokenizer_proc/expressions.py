"""Pre-tokenization expressions of byte-level tokenizers, and positions where every expression ends a word.

An expression matches the next word from the end of the last one and never looks back. So a text may be cut at the end
of a word, if the word before the cut would also end there at the end of a text.

*Borders* are positions where all expressions below end a word, by the characters on both sides:

* between a non-space character and a space, which belongs to the next word;
* between a letter and an ASCII non-letter, except an apostrophe (`don't` may be one word). Letters are Latin, Chinese,
  Japanese and Korean ones, which are equal in all Unicode versions;
* between a digit and an ASCII non-digit, or between a sign and a digit.

All borders have ASCII on the right, with which composition (NFC) never joins.

*Runs* are sequences of one kind of characters that each expression matches greedily. A cut within a run leaves both
parts as words or as ends of words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CJK = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_CJK_SIGNS = "\u3001\u3002"
_SIGN = r"!-/:-@\[-`{-~"
_NOT_WHITE = r"!-~\u00a1-\u167f\u3001-\ud7a3\U0001f000-\U0001faff"
BORDER = re.compile(
    "|".join(
        [
            f"(?<=[{_NOT_WHITE}])(?= )",
            rf"(?<=[A-Za-z{_CJK}])(?=[\t\r\n!-&(-@\[-`{{-~{_CJK_SIGNS}])",
            r"(?<=[0-9])(?=[\t\r\n!-/:-~])",
            f"(?<=[{_SIGN}])(?=[0-9])",
        ]
    )
)

_WHITE = (" +", r"\n+")
_SIGNS = r"[^\s\p{L}\p{M}\p{N}]+"
_MARKED_SIGNS = r"[^\s\p{L}\p{N}]+"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Condition for letters that begin a word."""

    run: re.Pattern[str]
    """The run of letters."""
    before: re.Pattern[str]
    """Allowed character before the first letter, if any."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Properties of a pre-tokenization expression."""

    digits: int | None
    """Digits per word; None if unlimited."""
    runs: tuple[str, ...]
    """Kinds of characters, as regular expressions of the tokenizers library."""
    beginnings: tuple[Beginning, ...] = ()
    """Conditions of the runs that are valid only at the beginning of a word."""


_PLAIN = (r"\p{L}+", *_WHITE)
_CONTRACTED = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    words = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    return (
        "|".join([*(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffix}" for word in words), digits])
        + rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _gpt4(digits: str) -> str:
    return (
        rf"(?i:{_CONTRACTED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


_CJK_WORD = Beginning(re.compile(f"[{_CJK}]+"), re.compile(rf"[\s!-@\[-`{{-~{_CJK_SIGNS}]?"))
"""Letters without case match both the uppercase and the lowercase part of a word."""
_ENGLISH_WORD = Beginning(re.compile("[A-Za-z]+"), re.compile(r"[\s0-9]?"))
"""After a sign, DeepSeek's words end with the English letters."""
_CASED = (r"\p{Ll}+", _CJK_WORD.run.pattern, *_WHITE, _SIGNS)

GPT2 = Expression(None, (*_PLAIN, r"\p{N}+", _MARKED_SIGNS))
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
EXPRESSIONS = {
    rf"{_CONTRACTED}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+": GPT2,
    # cl100k: GPT-4, Llama 3; Qwen 2 and 3 with digits by one
    _gpt4(r"\p{N}{1,3}"): Expression(3, (*_PLAIN, _MARKED_SIGNS)),
    _gpt4(r"\p{N}"): Expression(1, (*_PLAIN, _MARKED_SIGNS)),
    # o200k: GPT-4o, gpt-oss; and Mistral's Tekken
    _cased(f"(?i:{_CONTRACTED})?", r"\p{N}{1,3}"): Expression(3, _CASED, (_CJK_WORD,)),
    _cased("", r"\p{N}"): Expression(1, _CASED, (_CJK_WORD,)),
    # DeepSeek V3, after the expressions of `APART`
    DEEPSEEK: Expression(
        3, (r"\p{Lo}+", _ENGLISH_WORD.run.pattern, *_WHITE, r"[\p{P}\p{S}]+"), (_ENGLISH_WORD,)
    ),
}
APART = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")
"""Expressions that DeepSeek's tokenizer applies first: digits, then Chinese and Japanese."""


def without_marks(runs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds for tokenizers that compose texts first (NFC): a mark may combine with the character before it."""
    return tuple(_SIGNS if run == _MARKED_SIGNS else run for run in runs)
