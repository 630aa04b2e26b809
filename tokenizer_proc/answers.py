"""Answers of the tokenizer process without an admission: tokens of a text, and errors. No request may end the process."""

from __future__ import annotations

import logging
import time

from quintet.process.sockets import Peers
from quintet.tokenizer_proc.encode import Encoder
from quintet.wire.codec import pack_i32, pack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.ids import Role, frontend_of
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Cancel, Failed, Submit, Tokenized, TokenizeQuery, Unknown
from quintet.wire.request import Echo, RequestSpec


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
        result = _failed_query(query.query_id, result)
    try:
        peers.send(Role.FRONTEND, query.frontend, result)
    except FrameTooLarge as error:
        cause = f"The answer has {error.num_bytes} bytes, but at most {error.most} are allowed; send a shorter text."
        failed = _failed_query(query.query_id, RequestError(ErrorCode.TOO_LARGE, cause))
        peers.send(Role.FRONTEND, query.frontend, failed)


def _failed_query(query_id: int, error: RequestError) -> Tokenized:
    return Tokenized(query_id, b"", error=Failed(query_id, error.code, error.message, error.param))


def error_answer(message: object) -> Failed | Tokenized | Unknown | None:
    """Return the error answer to a message that cannot be queued."""
    cause = "Too many requests are queued while a frontend starts; retry the request."
    match message:
        case Submit():
            return Failed(message.request_id, ErrorCode.OVERLOADED, cause)
        case Cancel():
            return Unknown(pack_i64(message.request_ids))
        case TokenizeQuery():
            return _failed_query(message.query_id, RequestError(ErrorCode.OVERLOADED, cause))
        case _:
            return None


def dropped_answers(dropped: Dropped) -> list[tuple[int, int | None, Failed | Tokenized]]:
    """Return the error answers to the query and the requests of a dropped message, with frontend and epoch tag."""
    error = dropped.error(Role.TOKENIZER)
    answers: list[tuple[int, int | None, Failed | Tokenized]] = []
    if dropped.query_id is not None and dropped.frontend is not None:
        answers.append((dropped.frontend, None, _failed_query(dropped.query_id, error)))
    for request_id in dropped.request_ids:
        answers.append((*frontend_of(request_id), Failed(request_id, error.code, error.message)))
    return answers


def request_error(error: BaseException, what: str, log: logging.Logger) -> RequestError:
    """Return the error for an exception raised while ``what`` was encoded; an unexpected one is logged with its traceback.

    A panic of a Rust library is a `BaseException` without being an `Exception`. Raises requests to exit again.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, RecursionError):
        return invalid("A part of the request is nested too deeply; send it with fewer levels.")
    log.error("%s failed in the tokenizer", what, exc_info=error)
    return RequestError(
        ErrorCode.INTERNAL, f"Internal server error in the tokenizer ({what}); see the server's log."
    )


def check_embeds(spec: RequestSpec, embeds: EmbedsPrompt, config: EngineConfig) -> None:
    """Raise `RequestError` unless the request can be served with prompt embeddings."""
    width = config.model.embedding_width
    if not config.frontend.prompt_embeds:
        raise _refusal("prompt embeddings are disabled: set enable_prompt_embeds", "prompt_embeds")
    if embeds.width != width:
        raise _refusal(
            f"its embeddings have width {embeds.width}, but the model's width is {width}", "prompt_embeds"
        )
    params = spec.params
    for name, is_set in (
        ("echo", spec.echo is not Echo.NONE),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens is not None),
    ):
        if is_set:
            raise _refusal(
                f"{name} needs a prompt's tokens, which embeddings do not have: leave one of them out", name
            )


def _refusal(reason: str, param: str) -> RequestError:
    return invalid(f"The request with prompt_embeds was refused: {reason}.", param)
