"""Answers to queries of the frontends: tokens of a text without admission of a request."""

from __future__ import annotations

import time

from quintet.process.sockets import Peers
from quintet.tokenizer_proc.encode import Encoder
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Failed, Tokenized, TokenizeQuery


def tokenized(encoder: Encoder, query: TokenizeQuery) -> Tokenized:
    """Return the tokens of a query's prompt. Raises `RequestError`."""
    if query.until_ns is not None and time.monotonic_ns() > query.until_ns:
        raise RequestError(ErrorCode.TIMEOUT, "The query timed out in the tokenizer's queue; retry.")
    ids = encoder.whole(query.prompt)
    strs = encoder.token_strs(ids) if query.return_token_strs else None
    return Tokenized(query.query_id, pack_i32(ids), strs)


def send_answer(peers: Peers, query: TokenizeQuery, result: Tokenized | RequestError) -> None:
    """Send the result or the error to the frontend; an error too if the result exceeds the frame limit."""
    if isinstance(result, RequestError):
        result = _failure(query, result)
    try:
        peers.send(Role.FRONTEND, query.frontend, result)
    except FrameTooLarge as error:
        cause = f"The answer has {error.num_bytes} bytes, but at most {error.most} are allowed; send a shorter text."
        peers.send(Role.FRONTEND, query.frontend, _failure(query, RequestError(ErrorCode.TOO_LARGE, cause)))


def _failure(query: TokenizeQuery, error: RequestError) -> Tokenized:
    return Tokenized(
        query.query_id, b"", None, Failed(query.query_id, error.code, error.message, error.param)
    )
