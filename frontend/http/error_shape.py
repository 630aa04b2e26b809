"""HTTP form of an error: status, headers, and body in the format of the API.

Each API has an `ErrorShape`; the route table assigns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from quintet.wire.errors import ErrorCode, RequestError

STATUS = {
    ErrorCode.INVALID: 400,
    ErrorCode.TOO_LONG: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.HEAD_TOO_LARGE: 431,
    ErrorCode.UNSUPPORTED_MEDIA: 415,
    ErrorCode.UNPROCESSABLE: 422,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.TIMEOUT: 408,
    ErrorCode.DEADLINE: 504,
    ErrorCode.NOT_IMPLEMENTED: 400,
    ErrorCode.INTERNAL: 500,
}


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Error format of one API."""

    body: Callable[[RequestError, str], bytes]
    """Encodes the JSON body of an error, given the request id."""
    id_header: bytes = b""
    """Header for the request id, in addition to X-Request-Id; empty for none."""


def status_of(error: RequestError) -> int:
    return STATUS[error.code]


def headers_of(error: RequestError) -> list[tuple[bytes, bytes]]:
    if error.code is ErrorCode.UNAUTHORIZED:
        return [(b"www-authenticate", b"Bearer")]
    if error.retry_s or error.code in {ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED}:
        return [(b"retry-after", b"%d" % max(1, error.retry_s))]
    return []


def bare_response(error: RequestError, shape: ErrorShape) -> bytes:
    """Return a whole HTTP/1.1 response that closes the connection, for requests that do not reach the application."""
    body = shape.body(error, "")
    status = HTTPStatus(status_of(error))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
