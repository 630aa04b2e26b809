"""Added tokens that ``tokenizer_config.json`` declares and ``tokenizer.json`` lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quintet.wire.model_files import Json

_SWITCHES = ("single_word", "lstrip", "rstrip")
_MAX_DIGITS = 10


class _Vocabulary(msgspec.Struct):
    """Part of a tokenizer's model; Unigram has a list of tokens and scores."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


def declared_tokens(tokenizer_config: Json) -> dict[int, Json]:
    """Return the tokens of ``added_tokens_decoder`` by id, in order. Skips invalid ones."""
    declared = tokenizer_config.get("added_tokens_decoder")
    found: dict[int, Json] = {}
    for key, token in declared.items() if isinstance(declared, dict) else ():
        is_id = isinstance(key, str) and key.isdecimal() and len(key) <= _MAX_DIGITS
        content = token.get("content") if isinstance(token, dict) else None
        if is_id and isinstance(content, str) and content:  # the tokenizers library skips empty tokens
            found[int(key)] = token
    return dict(sorted(found.items()))


def with_declared_tokens(tokenizer: bytes, tokenizer_config: Json) -> bytes | None:
    """Return a ``tokenizer.json`` with the declared tokens that it lacks; None if it lacks none, or is invalid.

    transformers adds these tokens too. The tokenizers library assigns ids in order, so a token is added only if its id is
    the next one, or that of the same token in the vocabulary.
    """
    declared = declared_tokens(tokenizer_config)
    parsed = parsed_tokenizer(tokenizer) if declared else None
    if parsed is None:
        return None
    document, added = parsed
    present = {token["content"] for token in added}
    if all(token["content"] in present for token in declared.values()):
        return None
    ids = ids_of(document)
    if ids is None:
        return None
    following = max([len(ids), *(token["id"] + 1 for token in added)])
    missing = []
    for token_id, token in declared.items():
        if token["content"] not in present and token_id == ids.get(str(token["content"]), following):
            missing.append(_entry(token_id, token))
            following = max(following, token_id + 1)
    if not missing:
        return None
    return msgspec.json.encode(document | {"added_tokens": msgspec.Raw(msgspec.json.encode(added + missing))})


def parsed_tokenizer(tokenizer: bytes) -> tuple[dict[str, msgspec.Raw], list[dict[str, Any]]] | None:
    """Return the parts of a ``tokenizer.json`` and its added tokens; None if it is invalid."""
    try:
        document = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(document.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_valid = all(type(token.get("id")) is int and isinstance(token.get("content"), str) for token in added)
    return (document, added) if is_valid else None


def ids_of(document: Mapping[str, msgspec.Raw]) -> dict[str, int] | None:
    """Return the ids of the tokens of a tokenizer's model; None if it is invalid."""
    try:
        vocab = msgspec.json.decode(document.get("model", b"{}"), type=_Vocabulary).vocab
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}


def _entry(token_id: int, token: Json) -> Json:
    """Return the entry of a token in ``tokenizer.json``."""
    special = token.get("special") is True
    switches = {name: token.get(name) is True for name in _SWITCHES}
    normalized = bool(token.get("normalized", not special))
    return {
        "id": token_id,
        "content": token["content"],
        **switches,
        "normalized": normalized,
        "special": special,
    }
