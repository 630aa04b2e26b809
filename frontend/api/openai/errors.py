"""Error format of the OpenAI API, also used by API-independent paths."""

from __future__ import annotations

import msgspec

from quintet.frontend.http.error_shape import ErrorShape, status_of
from quintet.wire.errors import ErrorCode, RequestError

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
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_body(error: RequestError, _request_id: str = "") -> bytes:
    """Return ``{"error": {message, type, param, code}}``.

    ``code`` is a text, as in OpenAI's API: strict clients cannot read another type. It is the status, or for a request above the
    context length OpenAI's code, on which clients shorten the conversation.
    """
    status = status_of(error)
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES[status],
                "param": error.param,
                "code": error.code.value if error.code is ErrorCode.TOO_LONG else str(status),
            }
        }
    )


ERRORS = ErrorShape(error_body)
