"""Upper bound on the characters of a text per token."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

LENGTH_KEEPING = frozenset({"NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"})
"""Normalizers that never shorten a text."""

COMPOSING = frozenset({"NFC", "NFKC"})
"""Normalizers that compose up to `MOST_COMPOSED` characters into one."""

MOST_COMPOSED = 4


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
