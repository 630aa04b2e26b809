"""Conversion of log-probability columns to tokens with text."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.wire.codec import unpack_f32, unpack_i32
from quintet.wire.messages import Alternative, PositionLogprobs
from quintet.wire.step import PromptLogprobs, TokenLogprobs


def position(
    table: PieceTable, token_ids: Sequence[int], logprobs: Sequence[float], rank: int, text_offset: int
) -> PositionLogprobs:
    """Build the log-probabilities of one position. Both columns hold the chosen token, then the alternatives by rank.

    A token's text is decoded alone, with replacement characters for a partial character; ``token_bytes`` are exact.
    ``table`` must show special tokens, even if the request skips them in its text.
    """
    chosen, *top = (
        Alternative(token_id, logprob, table.text_of(token_id), table.raw[token_id], order)
        for order, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    )
    chosen.rank = rank
    return PositionLogprobs(chosen, top, text_offset)


def of_token(table: PieceTable, entry: TokenLogprobs, text_offset: int) -> PositionLogprobs:
    """Convert one sampled position."""
    return position(table, unpack_i32(entry.token_ids), unpack_f32(entry.logprobs), entry.rank, text_offset)


def of_prompt(
    table: PieceTable,
    entry: PromptLogprobs,
    known: list[PositionLogprobs | None],
    text_offsets: Sequence[int] | None,
) -> None:
    """Convert a range of prompt positions and write them into ``known``, a list with one entry per prompt token.

    ``text_offsets``: start of each prompt token's text, if the text includes the prompt.
    """
    width = entry.width
    token_ids, logprobs = unpack_i32(entry.token_ids), unpack_f32(entry.logprobs)
    for i, rank in enumerate(unpack_i32(entry.ranks)):
        index, columns = entry.first + i, slice(i * width, (i + 1) * width)
        offset = 0 if text_offsets is None else text_offsets[index]
        known[index] = position(table, token_ids[columns], logprobs[columns], rank, offset)


def prompt_offsets(table: PieceTable, prompt_ids: Sequence[int]) -> list[int]:
    """Return the start of each prompt token's text within the prompt's text."""
    decoder, offsets, length = table.decoder(), [], 0
    for token_id in prompt_ids:
        offsets.append(length + decoder.tentative_length)
        length += len(decoder.push(token_id))
    return offsets
