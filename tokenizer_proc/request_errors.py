"""Conversion of an exception to the error of the request that caused it. No request may end the process."""

from __future__ import annotations

import logging

from quintet.wire.errors import ErrorCode, RequestError


def request_error(error: BaseException, what: str, log: logging.Logger) -> RequestError:
    """Return the error for an exception raised while ``what`` was encoded; an unexpected one is logged with its traceback.

    A panic of a Rust library is a `BaseException` without being an `Exception`. Raises requests to exit again.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, RecursionError):
        return RequestError(
            ErrorCode.INVALID, "A part of the request is nested too deeply; send it with fewer levels."
        )
    log.error("%s failed in the tokenizer", what, exc_info=error)
    return RequestError(
        ErrorCode.INTERNAL, f"Internal server error in the tokenizer ({what}); see the server's log."
    )
