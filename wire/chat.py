"""Messages of a conversation, in `ChatPrompt.messages`.

The frontend decodes the client's JSON once, checks the messages and encodes them as MessagePack. The encoded form is
compact while the frontend retains it. The chat template gets every field of a message, in the client's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

MAX_ROLE = 256
"""Characters."""

WIDE_INTEGER = 1
"""Extension type of an integer beyond 64 bits, as decimal digits."""

Message = dict[str, Any]


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message. Other fields (``name``, ``tool_call_id``, …) are passed to the chat template."""

    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE)]
    """Bounded because every choice may repeat the last message's role."""
    content: str | list[Any] | dict[str, Any] | None = None
    """Text or parts, which the tokenizer checks; a tool result may also be an object or a list of any values."""
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The content's text."""
        if isinstance(self.content, list):
            texts = (part.get("text") if isinstance(part, dict) else part for part in self.content)
            return "".join(text for text in texts if isinstance(text, str))
        return self.content if isinstance(self.content, str) else ""


def check_messages(messages: object) -> list[ChatMessage]:
    """Return the checked fields of decoded messages. Raises `msgspec.ValidationError` or `RecursionError`."""
    return msgspec.convert(messages, list[ChatMessage])


def encode_messages(messages: Sequence[Any]) -> bytes:
    """Encode messages of JSON values. Raises `RecursionError`."""
    try:
        return _encoder.encode(messages)
    except OverflowError:
        return _encoder.encode(_with_wide_integers(messages))


def decode_messages(encoded: bytes) -> list[Message]:
    """Decode messages; the sender has checked their fields. Raises one of `codec.UNREADABLE`."""
    return _decoder.decode(encoded)


def checked_fields(encoded: bytes) -> list[ChatMessage]:
    """Decode and check the fields of `ChatMessage`. Raises `msgspec.ValidationError`."""
    return _fields_decoder.decode(encoded)


def _with_wide_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_wide_integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_wide_integers(each) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(WIDE_INTEGER, str(value).encode())
    return value


def _extension(code: int, digits: memoryview) -> int:
    if code != WIDE_INTEGER:
        raise msgspec.ValidationError(f"extension type {code} is unknown")
    return msgspec.json.decode(digits, type=int)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message], ext_hook=_extension)
_fields_decoder = msgspec.msgpack.Decoder(list[ChatMessage])
