"""Completion of ``tokenizer.json``: added tokens and BOS that only ``tokenizer_config.json`` declares, Tekken's expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quintet.deploy.config.gguf.pre_tokenizers import PRE_TOKENIZERS
from quintet.tokenizer_proc.template_files import named_tokens
from quintet.wire.model_files import Json

_SWITCHES = ("single_word", "lstrip", "rstrip")
MAX_DIGITS = 10
"""Limit of an id given as text."""
_BOS_CLASSES = (
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "GemmaTokenizer",
    "GPTNeoXTokenizer",
)
"""Tokenizer classes that apply ``add_bos_token``."""
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MISTRAL_TOKEN = "[AVAILABLE_TOOLS]"
"""A token of Mistral's vocabularies only."""

Document = Mapping[str, msgspec.Raw]
"""Parts of a ``tokenizer.json``."""
Added = Sequence[Mapping[str, Any]]
"""Its added tokens."""
Special = tuple[str, int]
"""Text and id of a special token."""


class _Vocabulary(msgspec.Struct):
    """Part of a tokenizer's model; Unigram has a list of tokens and scores."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


def vocabulary(model: msgspec.Raw) -> dict[str, int]:
    """Return the tokens of a tokenizer's model: text -> id. Raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
    vocab = msgspec.json.decode(model, type=_Vocabulary).vocab
    return vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}


def completed(tokenizer: bytes, tokenizer_config: Json) -> bytes | None:
    """Return the completed ``tokenizer.json``; None if it lacks nothing, or is invalid."""
    try:
        document = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(document.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not all(type(token.get("id")) is int and isinstance(token.get("content"), str) for token in added):
        return None
    missing = _missing_tokens(document, added, declared_tokens(tokenizer_config))
    added += missing
    parts = {
        "added_tokens": added if missing else None,
        "post_processor": _begin_token(document, added, tokenizer_config),
        "pre_tokenizer": _tekken_splitter(document, added),
    }
    changed = {name: part for name, part in parts.items() if part is not None}
    return msgspec.json.encode(document | changed) if changed else None


def with_bos(tokenizer: bytes, token: str) -> bytes:
    """Return a ``tokenizer.json`` with a post-processor that adds BOS; unchanged if its vocabulary lacks the token."""
    document = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(document.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    post_processor = _around_bos(document, added, token)
    return msgspec.json.encode(document | {"post_processor": post_processor}) if post_processor else tokenizer


def declared_tokens(tokenizer_config: Json) -> dict[int, Json]:
    """Return the tokens of ``added_tokens_decoder`` by id, in order. Skips invalid ones."""
    declared = tokenizer_config.get("added_tokens_decoder")
    found: dict[int, Json] = {}
    for key, token in declared.items() if isinstance(declared, dict) else ():
        is_id = isinstance(key, str) and key.isdecimal() and len(key) <= MAX_DIGITS
        content = token.get("content") if isinstance(token, dict) else None
        if is_id and isinstance(content, str) and content:  # the tokenizers library skips empty tokens
            found[int(key)] = token
    return dict(sorted(found.items()))


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


def _missing_tokens(document: Document, added: Added, declared: Mapping[int, Json]) -> list[Json]:
    """Return the declared tokens that a document lacks.

    transformers adds these tokens too. The tokenizers library assigns ids in order, so a token is added only if its id is
    the next one, or that of the same token in the vocabulary.
    """
    present = {token["content"] for token in added}
    lacking = {token_id: token for token_id, token in declared.items() if token["content"] not in present}
    ids = _ids_of(document) if lacking else None
    if ids is None:
        return []
    following = max([len(ids), *(token["id"] + 1 for token in added)])
    missing = []
    for token_id, token in lacking.items():
        if token_id == ids.get(str(token["content"]), following):
            missing.append(_entry(token_id, token))
            following = max(following, token_id + 1)
    return missing


def _ids_of(document: Document) -> dict[str, int] | None:
    """Return the ids of the tokens of a tokenizer's model; None if it is invalid."""
    try:
        return vocabulary(document.get("model", msgspec.Raw(b"{}")))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _entry(token_id: int, token: Json) -> Json:
    """Return the entry of a token in ``tokenizer.json``."""
    special = token.get("special") is True
    return {
        "id": token_id,
        "content": token["content"],
        **{name: token.get(name) is True for name in _SWITCHES},
        "normalized": bool(token.get("normalized", not special)),
        "special": special,
    }


def _begin_token(document: Document, added: Added, tokenizer_config: Json) -> Json | None:
    """Return a post-processor that adds BOS, if only ``tokenizer_config.json`` declares it.

    DeepSeek's tokenizers declare ``add_bos_token``, and transformers 4 then replaced the post-processor. One that adds
    special tokens itself is kept.
    """
    name, token = tokenizer_config.get("tokenizer_class"), named_tokens(tokenizer_config).get("bos_token")
    is_declared = isinstance(name, str) and name.removesuffix("Fast") in _BOS_CLASSES
    if not is_declared or token is None or tokenizer_config.get("add_bos_token") is not True:
        return None
    if not _adds_nothing(msgspec.json.decode(document.get("post_processor", b"null"))):
        return None
    return _around_bos(document, added, token)


def _around_bos(document: Document, added: Added, token: str) -> Json | None:
    ids = (_ids_of(document) or {}) | {each["content"]: each["id"] for each in added}
    return around((token, ids[token]), None) if token in ids else None


def _adds_nothing(processor: Any) -> bool:
    """Return whether a post-processor adds no special tokens."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "processors": list(steps)}:
            return all(map(_adds_nothing, steps))
    return False


def _tekken_splitter(document: Document, added: Added) -> object:
    """Return the pre-tokenizer of Mistral's Tekken if the document has Llama 3's expression instead; None otherwise.

    Mistral Small 3.1, Devstral, Magistral and their fine-tunes are affected. Words such as ``eBay`` then have other tokens
    than in training; see ``fix_mistral_regex`` of transformers.
    """
    if all(token["content"] != _MISTRAL_TOKEN for token in added):
        return None
    splitter: Any = msgspec.json.decode(document.get("pre_tokenizer", b"null"))
    match splitter:
        case {"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": str(found)} as pattern}, *_]} if (
            found == LLAMA3
        ):
            (pattern["Regex"],) = PRE_TOKENIZERS["tekken"].cuts
            return splitter
    return None
