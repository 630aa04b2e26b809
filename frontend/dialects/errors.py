"""How each error looks to a client of the OpenAI dialect: HTTP status, type, and the body's shape."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

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
    ErrorCode.NOT_IMPLEMENTED: 501,
    ErrorCode.INTERNAL: 500,
}

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def status_of(error: RequestError) -> int:
    """Return the HTTP status that says this error."""
    return STATUS[error.code]


def body_of(error: RequestError) -> bytes:
    """Return ``{"error": {message, type, param, code}}``; ``code`` is the status, as vLLM has it."""
    status = status_of(error)
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES[status],
                "param": error.param,
                "code": status,
            }
        }
    )


def headers_of(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the headers that go with this error."""
    if error.code is ErrorCode.UNAUTHORIZED:
        return [(b"www-authenticate", b"Bearer")]
    if error.retry_s or error.code in {ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED}:
        return [(b"retry-after", b"%d" % max(1, error.retry_s))]
    return []


def bare_response(error: RequestError) -> bytes:
    """Return a whole HTTP/1.1 response that closes the connection: for a request that never reached the application."""
    body = body_of(error)
    status = HTTPStatus(status_of(error))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
