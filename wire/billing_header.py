"""Claude Code's billing header: a first line of the system prompt that differs in each request.

Models do not need it, and it defeats prefix caching.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"\s*x-anthropic-[\w-]+:[^\n]*(?:\n+|\Z)")
_IN_JSON = re.compile(rb'x-anthropic-[\w-]+:(?:[^"\\]|\\[^n])*')


def without_billing_header(text: str) -> str:
    """Return the text of a system prompt without this line at its beginning."""
    match = _LINE.match(text)
    return text if match is None else text[match.end() :]


def without_billing_header_in_json(encoded: bytes) -> bytes:
    """Return the JSON of a system prompt without the first such line."""
    return _IN_JSON.sub(b"", encoded, count=1)
