"""Errors as FastChat tells them: a code of its own and a text, in an answer of status 200."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.errors import ErrorCode


class Code(IntEnum):
    """Those of FastChat's codes that this worker tells."""

    VALIDATION = 40001
    WRONG_KEY = 40102
    INVALID_MODEL = 40301
    OUT_OF_RANGE = 40302
    CONTEXT_OVERFLOW = 40303
    OVERLOADED = 42903
    INTERNAL = 50001
    WORKER_TIMEOUT = 50006


_OF_CODE: dict[int | str, Code] = {
    ErrorCode.TOO_LONG.value: Code.CONTEXT_OVERFLOW,
    400: Code.OUT_OF_RANGE,
    401: Code.WRONG_KEY,
    404: Code.INVALID_MODEL,
    413: Code.VALIDATION,
    422: Code.OUT_OF_RANGE,
    429: Code.OVERLOADED,
    503: Code.WORKER_TIMEOUT,
}


class WorkerError(Exception):
    """A request that ends with one of FastChat's errors."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text

    @property
    def told(self) -> dict[str, object]:
        """As FastChat reads it."""
        return {"text": self.text, "error_code": int(self.code)}


class ServerError(msgspec.Struct):
    """An error as the server tells it."""

    message: str
    code: int | str = 500
    param: str | None = None


class _Body(msgspec.Struct):
    error: ServerError


def error_in(body: bytes, status: int) -> ServerError:
    """Read the answer of a server that refused."""
    try:
        return msgspec.json.decode(body, type=_Body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ServerError(f"The server answered with status {status}.", status)


def as_worker(error: ServerError) -> WorkerError:
    """Return FastChat's error for the server's."""
    return WorkerError(_OF_CODE.get(error.code, Code.INTERNAL), error.message)


def lost(error: object) -> WorkerError:
    """Return the error for a server that cannot be reached, or was lost while it answered."""
    return WorkerError(Code.WORKER_TIMEOUT, f"The server behind this worker was lost ({error}); ask again.")
