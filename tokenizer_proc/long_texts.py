"""Encoding of long texts in chunks with the ids of the whole text, to bound memory; least number of tokens of a text.

The tokenizers library uses about 150 bytes of memory per byte of text, so a large text takes gigabytes.

* Byte-level tokenizers first split a text into words by a regular expression. It matches a word from the end of the last
  one and never looks back. `BORDER` matches where all `EXPRESSIONS` end a word, by the characters on both sides:
  between a non-space character and a space; between a letter and an ASCII non-letter, except an apostrophe; between a
  digit and an ASCII non-digit; between a sign and a digit. Letters are Latin, Chinese, Japanese and Korean ones, which
  are equal in all Unicode versions. Composition (NFC) never joins the right character with the left one.
* SentencePiece writes a space as U+2581. Its models treat a text as one word, or split before each U+2581. Without the
  split, a cut between a letter and U+2581 is safe for BPE if no token has a letter followed by U+2581. Then the merges
  on the two sides are independent. The vocabulary is checked once.
* Unigram models without the split are not cut: they compare sums of scores, which round differently in a chunk.

Other tokenizers encode the whole text at once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_letters

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

from quintet.wire.errors import invalid

CHUNK_CHARS = 1 << 17
MAX_CHUNK_CHARS = 1 << 19
"""A byte-level tokenizer rejects a text with fewer borders: no person writes words of this length."""

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
_SPACED = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""
_ACROSS = re.compile(f"[A-Za-z]{SPACE}")

_CONTRACTED = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    words = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    prefixed = [*(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffix}" for word in words), digits]
    return "|".join(prefixed) + rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _gpt4(digits: str) -> str:
    return (
        rf"(?i:{_CONTRACTED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
APART = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")
"""Expressions that DeepSeek's tokenizer applies first: digits, then Chinese and Japanese."""
EXPRESSIONS = (
    rf"{_CONTRACTED}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2
    _gpt4(r"\p{N}{1,3}"),  # cl100k: GPT-4, Llama 3
    _gpt4(r"\p{N}"),  # Qwen 2 and 3
    _cased(f"(?i:{_CONTRACTED})?", r"\p{N}{1,3}"),  # o200k: GPT-4o, gpt-oss
    _cased("", r"\p{N}"),  # Mistral's Tekken
    DEEPSEEK,  # after `APART`
)
"""Pre-tokenization expressions that end a word at each `BORDER`."""


LENGTH_KEEPING = frozenset({"NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"})
"""Normalizers that never shorten a text."""

COMPOSING = frozenset({"NFC", "NFKC"})
"""Normalizers that compose up to `MOST_COMPOSED` characters into one."""

MOST_COMPOSED = 4


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
    """Encodes texts in chunks without changing the ids."""

    tokenizer: Tokenizer
    border: re.Pattern[str]
    """Zero-width match at positions where a text may be cut."""
    max_chars: int | None = None
    """Maximum length of a chunk; longer texts without a border are rejected. None: they are encoded whole."""
    drops_space: bool = False
    """The tokenizer prepends a space to every text, so the leading space of a chunk is removed."""
    added: tuple[str, ...] = ()
    """Added tokens, which are matched before the split and must not be cut."""

    def ids_of(self, text: str, most: int | None = None, num_chars: int = CHUNK_CHARS) -> array[int]:
        """Return a text's ids, or more than ``most`` leading ones. Chunks have ``num_chars`` characters or more.

        Raises `RequestError` for a text that cannot be cut.
        """
        ids, begin = array("i"), 0
        while begin < len(text) and (most is None or len(ids) <= most):
            end = self._end_of_chunk(text, begin, num_chars)
            ids.extend(encoded(self.tokenizer, text[begin + (self.drops_space and begin > 0) : end]))
            begin = end
        return ids

    def _end_of_chunk(self, text: str, begin: int, num_chars: int) -> int:
        most = len(text) if self.max_chars is None else min(len(text), begin + self.max_chars)
        if len(text) - begin <= num_chars:
            return len(text)
        border = next(self._borders_in(text, begin + num_chars, most), None)
        if border is None and most < len(text):  # the next chunk begins with the run of one kind
            border = max(self._borders_in(text, begin + 1, begin + num_chars), default=None)
            if border is None:
                raise invalid(
                    f"The prompt has a word, or a run of characters of one kind, of more than {self.max_chars} characters; "
                    "insert spaces or line breaks.",
                )
        return len(text) if border is None else border

    def _borders_in(self, text: str, begin: int, end: int) -> Iterator[int]:
        borders = (match.start() for match in self.border.finditer(text, begin, end))
        return (at for at in borders if self._is_clear(text, at))

    def _is_clear(self, text: str, at: int) -> bool:
        """Return whether no added token is near a position."""
        reach = max(map(len, self.added), default=0)
        window = text[max(0, at - reach) : at + reach]
        normalizer = self.tokenizer.normalizer
        normal = window if normalizer is None else normalizer.normalize_str(window)
        return not any(content in window or content in normal for content in self.added)


def cutter_of(tokenizer: Tokenizer) -> Cutter | None:
    """Return the cutter of a tokenizer; None if its texts must be encoded whole."""
    try:
        normalizer, splitter = (
            None if part is None else msgspec.json.decode(part.__getstate__(), type=_Step)
            for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
        )
    except (msgspec.ValidationError, TypeError):
        return None  # unsupported tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    contents = tuple(token.content for token in added)
    if _keeps_borders(normalizer) and splitter is not None and _splits_words(splitter):
        return Cutter(tokenizer, BORDER, MAX_CHUNK_CHARS, added=contents)
    written = _spaces_written_by(normalizer, splitter)
    if written is None:
        return None
    prepends, splits = written
    if not (splits or _merges_within_borders(tokenizer)):
        return None
    return Cutter(tokenizer, _SPACED, drops_space=prepends, added=contents)


def _spaces_written_by(normalizer: _Step | None, splitter: _Step | None) -> tuple[bool, bool] | None:
    """Return whether a SentencePiece-like tokenizer prepends `SPACE` to every text, and whether each begins a word.

    None if it has other or further steps.
    """
    if normalizer is None:
        is_metaspace = splitter is not None and (splitter.type, splitter.replacement) == ("Metaspace", SPACE)
        return (False, splitter.split) if is_metaspace and splitter else None
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
    return prepends, False  # no space is left to split at


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
    """Return whether normalization of chunks equals that of the text: composition never joins across a border."""
    if normalizer is None:
        return True
    if normalizer.type == "Sequence":
        return all(map(_keeps_borders, normalizer.normalizers))
    return normalizer.type in {"NFC", "NFKC"}


def _splits_words(step: _Step) -> bool:
    """Return whether a pre-tokenizer first splits by one of `EXPRESSIONS`. Later steps split within its words."""
    match step:
        case _Step(type="Sequence", pretokenizers=[digits, cjk, *steps]) if _are_apart(digits, cjk):
            return _splits_words(_Step("Sequence", pretokenizers=steps))
        case _Step(type="Sequence", pretokenizers=[first, *others]):
            return _splits_words(first) and all(
                other.type in {"Split", "ByteLevel", "Digits"} and not other.add_prefix_space
                for other in others
            )
        case _Step(type="ByteLevel", use_regex=True, add_prefix_space=False):
            return True
        case _Step(type="Split", behavior="Isolated", invert=False):
            return step.pattern.regex in EXPRESSIONS
    return False


def _are_apart(*steps: _Step) -> bool:
    return tuple(step.pattern.regex for step in steps) == APART and all(
        step.behavior == "Isolated" for step in steps
    )


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return a text's ids."""
    # encode_batch_fast releases the GIL; encode does not.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens added before and after a text."""
    bare, whole = encoded(tokenizer, "a"), encoded(tokenizer, "a", add_special_tokens=True)
    begin = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:begin], whole[begin + len(bare) :]


def most_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Return an upper bound on the characters of a text per token, or None if unbounded.

    It is unbounded if a normalizer drops characters, or if unknown characters are dropped or share one token.
    """
    model, splitter, normalizer = tokenizer.model, tokenizer.pre_tokenizer, tokenizer.normalizer
    every_byte = isinstance(model, BPE) and (
        model.byte_fallback or (splitter is not None and b'"ByteLevel"' in splitter.__getstate__())
    )
    shrink = 1 if normalizer is None else _max_composed(msgspec.json.decode(normalizer.__getstate__()))
    if not every_byte or shrink is None:
        return None
    longest = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return max(1, longest) * shrink


def _max_composed(normalizer: dict[str, object]) -> int | None:
    """Return the maximum number of characters that a normalizer turns into one; None if unbounded."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(inner)}:
            shrinks = [_max_composed(child) for child in inner]
            known = [shrink for shrink in shrinks if shrink is not None]
            return max(known, default=1) if len(known) == len(shrinks) else None
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new) >= len(old) else None
        case {"type": str(kind)} if kind in COMPOSING:
            return MOST_COMPOSED
        case {"type": str(kind)} if kind in LENGTH_KEEPING:
            return 1
        case _:
            return None
