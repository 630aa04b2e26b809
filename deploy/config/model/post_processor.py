"""Special tokens around every text: the post-processor of ``tokenizer.json``."""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.deploy.config.model.added_tokens import ids_of, parsed_tokenizer
from quintet.tokenizer_proc.template_files import named_tokens
from quintet.wire.model_files import Json

_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer")
"""Tokenizer classes that apply ``add_bos_token``."""

Special = tuple[str, int]
"""Text and id of a special token."""


def around(first: Special | None, last: Special | None) -> Json | None:
    """Return a post-processor that adds these tokens before and after a text; None without any."""
    if first is None and last is None:
        return None
    before, after = (
        [] if each is None else [{"SpecialToken": {"id": each[0], "type_id": 0}}] for each in (first, last)
    )
    one, other = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*before, one, *after],
        "pair": [*before, one, other, *after],
        "special_tokens": {
            each[0]: {"id": each[0], "ids": [each[1]], "tokens": [each[0]]} for each in (first, last) if each
        },
    }


def with_begin_token(tokenizer: bytes, tokenizer_config: Json) -> bytes | None:
    """Return a ``tokenizer.json`` that adds BOS, if only ``tokenizer_config.json`` declares it; None if nothing changes.

    DeepSeek's tokenizers declare ``add_bos_token``, and transformers 4 then replaced the post-processor. One that adds
    special tokens itself is kept.
    """
    name, token = tokenizer_config.get("tokenizer_class"), named_tokens(tokenizer_config).get("bos_token")
    is_declared = isinstance(name, str) and name.removesuffix("Fast") in _CLASSES
    if not is_declared or token is None or tokenizer_config.get("add_bos_token") is not True:
        return None
    parsed = parsed_tokenizer(tokenizer)
    if parsed is None:
        return None
    document, added = parsed
    if not _adds_nothing(msgspec.json.decode(document.get("post_processor", b"null"))):
        return None
    ids = (ids_of(document) or {}) | {each["content"]: each["id"] for each in added}
    if token not in ids:
        return None
    processor = msgspec.json.encode(around((token, ids[token]), None))
    return msgspec.json.encode(document | {"post_processor": msgspec.Raw(processor)})


def _adds_nothing(processor: Any) -> bool:
    """Return whether a post-processor adds no special tokens."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "processors": list(steps)}:
            return all(map(_adds_nothing, steps))
    return False
