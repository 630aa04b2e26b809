"""Typed errors of clients and operators, in a form that can be sent between processes."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Kind of error; the frontend maps it to an HTTP status and to each API's error type."""

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
    """The client sent its request or read its answer too slowly."""
    DEADLINE = "deadline_exceeded"
    """The client's deadline has passed."""
    NOT_IMPLEMENTED = "not_implemented"
    INTERNAL = "internal_error"


class RequestError(Exception):
    """The request cannot be served as sent.

    ``message`` says what was sent, what is allowed and how to fix it. ``param`` names the field, as the client spells
    it, when there is one. ``retry_s`` is the delay in seconds before a retry; 0 if unknown.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_s: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_s = retry_s


def invalid(message: str, param: str | None = None) -> RequestError:
    """Return the error of a request that is not allowed as it was sent: status 400."""
    return RequestError(ErrorCode.INVALID, message, param)


class ConfigError(Exception):
    """The configuration cannot work; the message names the flag or file and the fix.

    Raised at start. A process that ends with it exits with `EXIT_CONFIG` and is not restarted.
    """


EXIT_CONFIG = 78
"""Exit status for a configuration error: the supervisor does not restart the process (``EX_CONFIG`` of sysexits.h)."""
