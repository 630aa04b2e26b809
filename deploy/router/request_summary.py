"""Parsing of request bodies for routing: prefix hashes, prompt size, session, streaming."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quintet.frontend.load_balancing.load_ledger import num_prompt_tokens
from quintet.frontend.load_balancing.prefix_affinity import hash_prefixes
from quintet.wire.codec import pack_i32
from quintet.wire.message_text import without_billing_header_in_json
from quintet.wire.messages import Prompt, TextPrompt, TokenPrompt


class _Body(msgspec.Struct):
    """Relevant fields of request bodies of all APIs."""

    model: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    session_id: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"")


MAX_DIGITS = 10
"""Numbers with more digits are ignored."""
_decode = msgspec.json.Decoder(_Body).decode


@dataclass(slots=True)
class RequestSummary:
    """Properties of a request for routing."""

    names: list[int] = field(default_factory=list)
    """Hashes of the prompt's prefixes."""
    num_tokens: int = 0
    """Estimated prompt tokens."""
    is_streamed: bool = False
    session: str = ""
    """Session key, equal for requests of one conversation; "" for none."""
    max_outputs: int = 0
    """Maximum output tokens; 0 if not set."""


def read(body: bytes, session: str) -> RequestSummary:
    """Parse a request body. An invalid body gives an empty summary; a server rejects it."""
    try:
        fields = _decode(body)
        prompt = _prompt_of(fields)
        salt = _text(fields.cache_salt)
        sessions = (fields.session_id, fields.prompt_cache_key, fields.user)
        of_body = next(filter(None, map(_text, sessions)), "")
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError, RecursionError):
        return RequestSummary(session=session)
    names = hash_prefixes(prompt, salt, bytes(fields.model))
    is_streamed = bytes(fields.stream) in (b"true", b'"true"', b"1")
    max_outputs = next(
        filter(
            None, map(_count, (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens))
        ),
        0,
    )
    return RequestSummary(names, num_prompt_tokens(prompt), is_streamed, session or of_body, max_outputs)


def _prompt_of(body: _Body) -> Prompt:
    """Return the prompt like a server's frontend, as far as the body determines it."""
    if bytes(body.messages):
        system = without_billing_header_in_json(bytes(body.system))
        return _json_prompt(bytes(body.tools) + system + bytes(body.messages))
    raw = bytes(body.prompt) or bytes(body.token_ids)
    if raw.startswith(b'"'):
        return TextPrompt(msgspec.json.decode(raw, type=str))
    if raw.startswith(b"[") and raw[1:].lstrip()[:1].isdigit():
        return TokenPrompt(pack_i32(msgspec.json.decode(raw, type=list[int])))
    return _json_prompt(bytes(body.tools) + (raw or bytes(body.input)))


def _json_prompt(encoded: bytes) -> TextPrompt:
    """Return a conversation as its JSON text: the router does not decode it."""
    return TextPrompt(encoded.decode(errors="replace"))


def _count(raw: msgspec.Raw) -> int:
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < MAX_DIGITS else 0


def _text(raw: msgspec.Raw) -> str:
    encoded = bytes(raw)
    return str(msgspec.json.decode(encoded))[:256] if encoded.startswith(b'"') else ""
