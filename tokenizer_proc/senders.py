"""Sender of a message to the tokenizer process, and the error answer to a message that cannot be queued."""

from __future__ import annotations

from quintet.wire.codec import pack_i64
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import epoch_tag, frontend_of
from quintet.wire.messages import Cancel, Failed, InFlightReport, Submit, Tokenized, TokenizeQuery, Unknown


def sender_of(message: object) -> tuple[int, int | None] | None:
    """Return the frontend's index and its epoch tag, if the message has it; None for other messages."""
    match message:
        case Submit():
            return frontend_of(message.request_id)
        case Cancel(request_ids=[first, *_]):
            return frontend_of(first)
        case InFlightReport():
            return message.sender.index, epoch_tag(message.sender.epoch)
        case TokenizeQuery():
            return message.frontend, None
        case _:
            return None


def error_answer(message: object) -> Failed | Tokenized | Unknown | None:
    """Return the error answer to a message that cannot be queued."""
    cause = "Too many requests are queued while a frontend starts; retry the request."
    match message:
        case Submit():
            return Failed(message.request_id, ErrorCode.OVERLOADED, cause)
        case Cancel():
            return Unknown(pack_i64(message.request_ids))
        case TokenizeQuery():
            failed = Failed(message.query_id, ErrorCode.OVERLOADED, cause)
            return Tokenized(message.query_id, b"", None, failed)
        case _:
            return None
