"""Text of messages: without Claude Code's billing header, and with text instead of images in tool results.

The billing header is a first line of the system prompt that differs in each request. Models do not need it, and it defeats
prefix caching.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from typing import Any

from quintet.wire.params import MAX_SHOWN, shown

_LINE = re.compile(r"\s*x-anthropic-[\w-]+:[^\n]*(?:\n+|\Z)")
_IN_JSON = re.compile(rb'x-anthropic-[\w-]+:(?:[^"\\]|\\[^n])*')
MEDIA_TYPES = {
    f"{before}{medium}{after}": medium
    for medium in ("image", "audio", "video", "document", "file")
    for before in ("", "input_")
    for after in ("", "_url")
}
"""Types of parts that are not text: ``input_image``, ``image_url``, ``input_file``, …"""
_PAYLOADS = frozenset({"source", "file_id", "file_data", "file_url", *MEDIA_TYPES})
_MEDIA_PAYLOADS = _PAYLOADS | {"data", "url"}
"""Fields of such parts, one of which each has. A file or document with only a URL is data, such as a row of a listing."""
TEXT_FIELDS = ("text", "refusal", "thinking")
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
    "reasoning": "text",
}  # fmt: skip
"""Types of text parts, and the field with the text. Other objects with such a field are data, such as messages of a service."""
_log = logging.getLogger("quintet")


def without_billing_header(text: str) -> str:
    """Return the text of a system prompt without this line at its beginning."""
    match = _LINE.match(text)
    return text if match is None else text[match.end() :]


def without_billing_header_in_json(encoded: bytes) -> bytes:
    """Return the JSON of a system prompt without the first such line."""
    return _IN_JSON.sub(b"", encoded, count=1)


def text_only_result(content: Any, where: str, fields: Collection[str] = TEXT_FIELDS) -> Any:
    """Return a tool result's content with text instead of media, and JSON text instead of data.

    Data is an object, or a list without text and parts. A part has one of ``fields``. Others are returned unchanged.
    """
    if isinstance(content, list) and (not content or any(_is_part(each, fields) for each in content)):
        return [_text_only_part(part, f"{where}[{i}]", fields) for i, part in enumerate(content)]
    return json_text(content) if isinstance(content, list | dict) else content


def omitted_media(kind: str, where: str) -> str | None:
    """Return the text that replaces a part of this type; None if the type is not of media. Logs the replacement."""
    return omitted_part(kind, where) if kind in MEDIA_TYPES else None


def omitted_part(kind: str, where: str) -> str:
    """Return the text that replaces a part of this type in a tool result. Logs the replacement."""
    _log.info("%s, of type %s in a tool result, was replaced by text", where, shown(kind))
    return f"[{MEDIA_TYPES.get(kind, kind)[:MAX_SHOWN]} omitted: this model reads text only]"


def json_text(value: Any) -> str:
    """Encode a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_part(value: Any, fields: Collection[str]) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, str)
    kind = value.get("type")
    is_text = kind is None or (isinstance(kind, str) and kind in TEXT_PARTS)
    return (is_text and any(name in value for name in fields)) or _is_media(value)


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    medium = MEDIA_TYPES.get(kind) if isinstance(kind, str) else None
    payloads = _PAYLOADS if medium in ("file", "document") else _MEDIA_PAYLOADS
    return medium is not None and not payloads.isdisjoint(part)


def _text_only_part(part: Any, where: str, fields: Collection[str]) -> Any:
    if not _is_part(part, fields):
        return json_text(part)
    return omitted_media(part["type"], where) if isinstance(part, dict) and _is_media(part) else part
