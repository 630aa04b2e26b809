"""Log-probabilities as columns of ids, turned into tokens with their text."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.wire.codec import unpack_f32, unpack_i32
from quintet.wire.messages import Alternative, PositionLogprobs
from quintet.wire.step import PromptLogprobs, TokenLogprobs


def position(
    table: PieceTable, token_ids: Sequence[int], logprobs: Sequence[float], rank: int, text_offset: int
) -> PositionLogprobs:
    """Name the tokens of one position: the token itself first in both columns, then alternatives, most likely first.

    A token's text is its own, replacement characters where it is part of a character; ``token_bytes`` are exact.
    ``table`` must show special tokens, whatever the request does with them in its text.
    """
    chosen, *top = (
        Alternative(token_id, logprob, table.text_of(token_id), table.raw[token_id], order)
        for order, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    )
    chosen.rank = rank
    return PositionLogprobs(chosen, top, text_offset)


def of_token(table: PieceTable, entry: TokenLogprobs, text_offset: int) -> PositionLogprobs:
    """Read one sampled position."""
    return position(table, unpack_i32(entry.token_ids), unpack_f32(entry.logprobs), entry.rank, text_offset)


def of_prompt(
    table: PieceTable,
    entry: PromptLogprobs,
    known: list[PositionLogprobs | None],
    text_offsets: Sequence[int] | None,
) -> None:
    """Write a stretch of prompt positions into ``known``, one place per prompt token.

    ``text_offsets`` say where each prompt token's text begins, when the text begins with the prompt.
    """
    width = entry.width
    token_ids, logprobs = unpack_i32(entry.token_ids), unpack_f32(entry.logprobs)
    for i, rank in enumerate(unpack_i32(entry.ranks)):
        index, columns = entry.first + i, slice(i * width, (i + 1) * width)
        offset = 0 if text_offsets is None else text_offsets[index]
        known[index] = position(table, token_ids[columns], logprobs[columns], rank, offset)


def prompt_offsets(table: PieceTable, prompt_ids: Sequence[int]) -> list[int]:
    """Return where each prompt token's text begins in the prompt's text."""
    decoder, offsets, length = table.decoder(), [], 0
    for token_id in prompt_ids:
        offsets.append(length + decoder.tentative_length)
        length += len(decoder.push(token_id))
    return offsets
