"""The regular expressions that byte-level tokenizers split a text into words by, and where words end whatever is beyond.

They look for the next word from where the last one ended, and never back. So a text may be cut where a word is known to end, if
the word before the cut is the same where the text ends there.

*Borders* are places that all of the expressions below end a word at, by the characters on either side:

* between what is no white space and a space, which belongs to what is behind it;
* between a letter and ASCII that is none, but for an apostrophe (`don't` may be one word), of Latin, Chinese, Japanese and
  Korean, whose letters no version of Unicode disputes;
* between a digit and ASCII that is none, or a sign and a digit.

All have ASCII on their right, to which composing (NFC) joins nothing.

*Runs* are characters of a kind of which each expression takes as many as there are. Within one, both parts are the words, or
the ends of words, that they were.
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
    """Where letters begin a word."""

    run: re.Pattern[str]
    """As many of them as there are."""
    before: re.Pattern[str]
    """What may stand before the first one, if anything does."""


@dataclass(frozen=True, slots=True)
class Expression:
    """What is known of one."""

    digits: int | None
    """How many digits make a word; None if as many as there are."""
    runs: tuple[str, ...]
    """Kinds of characters, as expressions of the library's."""
    beginnings: tuple[Beginning, ...] = ()
    """Of the runs that only count where their word begins with them."""


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
"""Letters without case belong to the capitals of a word, or to its small letters."""
_ENGLISH_WORD = Beginning(re.compile("[A-Za-z]+"), re.compile(r"[\s0-9]?"))
"""Behind a sign, DeepSeek's words end where English does."""
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
    # DeepSeek V3, behind the expressions of `APART`
    DEEPSEEK: Expression(
        3, (r"\p{Lo}+", _ENGLISH_WORD.run.pattern, *_WHITE, r"[\p{P}\p{S}]+"), (_ENGLISH_WORD,)
    ),
}
APART = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")
"""What DeepSeek's splits a text by first: digits, and Chinese and Japanese."""


def without_marks(runs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds as they are where a text is composed before: a mark may belong to what is before it."""
    return tuple(_SIGNS if run == _MARKED_SIGNS else run for run in runs)
