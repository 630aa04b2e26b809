"""Pre-tokenizer of Mistral's Tekken: ``tokenizer.json`` of several releases has Llama 3's expression instead.

Mistral Small 3.1, Devstral, Magistral and their fine-tunes are affected. Words such as ``eBay`` then have other tokens than
in training; see ``fix_mistral_regex`` of transformers.
"""

from __future__ import annotations

import msgspec

from quintet.deploy.config.gguf.pre_tokenizers import PRE_TOKENIZERS
from quintet.deploy.config.model.added_tokens import parsed_tokenizer

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TOKEN = "[AVAILABLE_TOOLS]"
"""A token of Mistral's vocabularies only."""


def with_tekken_pattern(tokenizer: bytes) -> bytes | None:
    """Return a ``tokenizer.json`` of Mistral with Tekken's expression instead of Llama 3's; None if nothing changes."""
    if _TOKEN.encode() not in tokenizer:
        return None
    parsed = parsed_tokenizer(tokenizer)
    if parsed is None or all(token["content"] != _TOKEN for token in parsed[1]):
        return None
    document, _ = parsed
    splitter = msgspec.json.decode(document.get("pre_tokenizer", b"null"))
    match splitter:
        case {"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": str(found)} as pattern}, *_]} if (
            found == LLAMA3
        ):
            (pattern["Regex"],) = PRE_TOKENIZERS["tekken"].cuts
            return msgspec.json.encode(
                document | {"pre_tokenizer": msgspec.Raw(msgspec.json.encode(splitter))}
            )
    return None
