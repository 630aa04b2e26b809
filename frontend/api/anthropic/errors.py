"""Error format of the Anthropic API."""

from __future__ import annotations

import re

from quintet.frontend.api.anthropic.types import MessagesErrorBody, MessagesErrorDetail
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.http.error_shape import ErrorShape, status_of
from quintet.wire.errors import ErrorCode, RequestError

OVERLOADED = "overloaded_error"
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: OVERLOADED,
    504: "timeout_error",
}
OTHER = "invalid_request_error"
TOO_LONG = "prompt is too long: "
"""Prefix of Anthropic's own message; agents compact the conversation and retry when they see it."""
_LENGTHS = re.compile(r"length is (\d+) tokens.*?(\d+) in the ", re.DOTALL)
"""Limit and length of the prompt in the message of `quintet.wire.request.check_length`."""
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""By wrong field. Clients that read this code resend the whole conversation, without a thread."""


def error_body(error: RequestError, request_id: str) -> bytes:
    """Return ``{"type": "error", "error": {type, message}, "request_id": …}``."""
    kind = _TYPES.get(status_of(error), OTHER)
    message = _too_long(error.message) if error.code is ErrorCode.TOO_LONG else error.message
    detail = MessagesErrorDetail(type=kind, message=message, details=_DETAILS.get(error.param or ""))
    return encode_json(MessagesErrorBody(type="error", error=detail, request_id=request_id))


def _too_long(message: str) -> str:
    """Return the message with the lengths as Anthropic writes them: Claude Code drops as many tokens as there are too many."""
    lengths = _LENGTHS.search(message)
    counts = "" if lengths is None else f"{lengths[2]} tokens > {lengths[1]} maximum. "
    return f"{TOO_LONG}{counts}{message}"


ERRORS = ErrorShape(error_body, b"request-id")
