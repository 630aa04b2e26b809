"""FastChat errors: a FastChat error code and a message, with HTTP status 200."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.errors import ErrorCode


class Code(IntEnum):
    """FastChat error codes used by this worker."""

    VALIDATION = 40001
    WRONG_KEY = 40102
    INVALID_MODEL = 40301
    OUT_OF_RANGE = 40302
    CONTEXT_OVERFLOW = 40303
    OVERLOADED = 42903
    INTERNAL = 50001
    WORKER_TIMEOUT = 50006


_OF_CODE = {
    ErrorCode.TOO_LONG.value: Code.CONTEXT_OVERFLOW,
    "400": Code.OUT_OF_RANGE,
    "401": Code.WRONG_KEY,
    "404": Code.INVALID_MODEL,
    "413": Code.VALIDATION,
    "422": Code.OUT_OF_RANGE,
    "429": Code.OVERLOADED,
    "503": Code.WORKER_TIMEOUT,
}


class WorkerError(Exception):
    """A request failure with a FastChat error code."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text

    @property
    def body(self) -> dict[str, object]:
        """FastChat's error object."""
        return {"text": self.text, "error_code": int(self.code)}


class ServerError(msgspec.Struct):
    """Error object of the server."""

    message: str
    code: int | str = "500"
    param: str | None = None


class _Body(msgspec.Struct):
    error: ServerError


def error_in(body: bytes, status: int) -> ServerError:
    """Parse an error response of the server."""
    try:
        return msgspec.json.decode(body, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ServerError(f"The server returned status {status}.", status)


def as_worker(error: ServerError) -> WorkerError:
    """Convert a server error to a FastChat error."""
    return WorkerError(_OF_CODE.get(str(error.code), Code.INTERNAL), error.message)


def server_lost(error: object) -> WorkerError:
    """Return the error for a lost connection to the server."""
    return WorkerError(Code.WORKER_TIMEOUT, f"The worker lost its server ({error}); retry the request.")
