"""What the router reads of a request: its prompt, as far as that decides where it goes, and whether it is streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quintet.frontend.load_balancing.prefix_affinity import names_of
from quintet.frontend.prompt_size import num_prompt_tokens
from quintet.wire.billing_header import without_billing_header_in_json
from quintet.wire.codec import pack_i32
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt


class _Body(msgspec.Struct):
    """The fields that say so in any dialect."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"")


MAX_DIGITS = 10
"""A number of more is none of tokens."""
_decode = msgspec.json.Decoder(_Body).decode


@dataclass(slots=True)
class RequestSummary:
    """What decides where a request goes."""

    names: list[int] = field(default_factory=list)
    """Of its prompt's beginnings."""
    num_tokens: int = 0
    """Of its prompt, about."""
    is_streamed: bool = False
    session: str = ""
    """What it has in common with others of its conversation; "" for nothing."""
    max_outputs: int = 0
    """Tokens that its answer may have; 0 where it does not say."""


def read(body: bytes, session: str) -> RequestSummary:
    """Read a request. What cannot be read is a server's to refuse: nothing is known of it."""
    try:
        given = _decode(body)
        prompt = _prompt_of(given)
        salt = _text(given.cache_salt)
        of_body = _text(given.prompt_cache_key) or _text(given.user)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError, RecursionError):
        return RequestSummary(session=session)
    names = names_of(prompt, salt)
    is_streamed = bytes(given.stream) in (b"true", b'"true"', b"1")
    max_outputs = next(
        filter(None, map(_count, (given.max_completion_tokens, given.max_output_tokens, given.max_tokens))), 0
    )
    return RequestSummary(names, num_prompt_tokens(prompt), is_streamed, session or of_body, max_outputs)


def _prompt_of(body: _Body) -> Prompt:
    """Return the prompt as the frontend of a server would, where that is known from the body alone."""
    if bytes(body.messages):
        system = without_billing_header_in_json(bytes(body.system))
        return ChatPrompt(bytes(body.messages), tools=bytes(body.tools) + system)
    raw = bytes(body.prompt) or bytes(body.token_ids)
    if raw.startswith(b'"'):
        return TextPrompt(msgspec.json.decode(raw, type=str))
    if raw.startswith(b"[") and raw[1:].lstrip()[:1].isdigit():
        return TokenPrompt(pack_i32(msgspec.json.decode(raw, type=list[int])))
    return ChatPrompt(raw or bytes(body.input), tools=bytes(body.tools))


def _count(raw: msgspec.Raw) -> int:
    digits = bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < MAX_DIGITS else 0


def _text(raw: msgspec.Raw) -> str:
    encoded = bytes(raw)
    return str(msgspec.json.decode(encoded))[:256] if encoded.startswith(b'"') else ""
