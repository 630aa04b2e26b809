"""Formats of log-probabilities: completions, chat, and prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintet.frontend.api.openai.answer import AnswerOptions
from quintet.wire.messages import Alternative, PositionLogprobs, Started

FLOOR = -9999.0
"""JSON has no minus infinity."""


def token_text(alternative: Alternative, options: AnswerOptions) -> str:
    """Return a token's text, or ``token_id:<id>`` if requested."""
    return f"token_id:{alternative.token_id}" if options.tokens_as_ids else alternative.token


def _distinct(position: PositionLogprobs, limit: int) -> Iterator[Alternative]:
    """Yield the chosen token, then at most ``limit`` of the most likely others."""
    yield position.chosen
    others = (a for a in position.top if a.token_id != position.chosen.token_id)
    for _, alternative in zip(range(limit), others, strict=False):
        yield alternative


def completion_logprobs(
    positions: Sequence[PositionLogprobs], options: AnswerOptions
) -> dict[str, list[object]]:
    """Return the parallel lists of the completions format. Of alternatives with equal text, the most likely one counts."""
    shape: dict[str, list[object]] = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    for position in positions:
        shape["text_offset"].append(position.text_offset)
        shape["token_logprobs"].append(max(position.chosen.logprob, FLOOR))
        shape["tokens"].append(token_text(position.chosen, options))
        alternatives: dict[str, float] = {}
        for a in _distinct(position, options.max_alternatives):  # parts of characters have the same text
            text = token_text(a, options)
            alternatives[text] = max(a.logprob, alternatives.get(text, FLOOR))
        shape["top_logprobs"].append(alternatives)
    return shape


def echoed_logprobs(started: Started, options: AnswerOptions) -> dict[str, list[object]]:
    """Return the completions format for the prompt's tokens; the first token has no log-probability."""
    positions = started.prompt_logprobs or []
    known = [position for position in positions if position is not None]
    shape = completion_logprobs(known, options)
    if started.first_token is not None:
        shape["text_offset"].insert(0, 0)
        shape["token_logprobs"].insert(0, None)
        shape["tokens"].insert(0, token_text(started.first_token, options))
        shape["top_logprobs"].insert(0, None)
    return shape


def joined(first: dict[str, list[object]], second: dict[str, list[object]]) -> dict[str, list[object]]:
    """Append one completions format to another."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(positions: Sequence[PositionLogprobs], options: AnswerOptions) -> dict[str, object]:
    limit = options.max_alternatives
    return {
        "content": [
            {
                **_chat_token(p.chosen, options),
                "top_logprobs": [_chat_token(a, options) for a in p.top[:limit]],
            }
            for p in positions
        ]
    }


def _chat_token(alternative: Alternative, options: AnswerOptions) -> dict[str, object]:
    return {
        "token": token_text(alternative, options),
        "logprob": max(alternative.logprob, FLOOR),
        "bytes": list(alternative.token_bytes),
    }


def prompt_logprobs(started: Started, options: AnswerOptions) -> list[dict[str, object] | None] | None:
    """Return the ``prompt_logprobs`` list: one map from token id to probability per prompt token, or None."""
    if started.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(a.token_id): {
                "logprob": max(a.logprob, FLOOR),
                "rank": a.rank,
                "decoded_token": token_text(a, options),
            }
            for a in _distinct(position, len(position.top))
        }
        for position in started.prompt_logprobs
    ]
