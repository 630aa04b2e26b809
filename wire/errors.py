"""Errors that are somebody's mistake, in a form that survives the trip to the client."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong; the frontend's table turns each into an HTTP status and each dialect's error type."""

    INVALID = "invalid_request"
    TOO_LONG = "context_length_exceeded"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    UNAUTHORIZED = "invalid_api_key"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "request_too_large"
    HEAD_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media_type"
    UNPROCESSABLE = "unprocessable"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    """The client took too long."""
    DEADLINE = "deadline_exceeded"
    """The time that the client gave is over."""
    NOT_IMPLEMENTED = "not_implemented"
    INTERNAL = "internal_error"


class RequestError(Exception):
    """The request cannot be served as sent.

    ``message`` says what was sent, what is allowed and how to fix it; ``param`` names the field, as the client
    spells it, when there is one. After ``retry_s`` seconds trying again makes sense; 0 says nothing of it.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_s: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_s = retry_s


class ConfigError(Exception):
    """The configuration cannot work; the message names the flag or file and the way out.

    Raised while booting; a process that dies of it exits with `EXIT_CONFIG` and is not restarted.
    """


EXIT_CONFIG = 78
"""Exit status that says "I cannot boot like this, do not restart me" (``EX_CONFIG`` of sysexits.h)."""
