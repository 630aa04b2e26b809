"""Prompts of completions and embeddings: text, token ids, or a list of either; and the token ids of any prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quintet.frontend.service import Service
from quintet.wire.codec import ID_BYTES, pack_i32, unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import ChatPrompt, TextPrompt, TokenPrompt
from quintet.wire.params import check_token_ids
from quintet.wire.request import check_length

Input = str | list[str | int | list[int]]
"""One text, or the ids of one; or a list of either."""


class PromptFields(Protocol):
    """Fields of a body with such prompts."""

    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None


def parse_prompts(
    given: Input | None,
    field: str,
    body: PromptFields,
    model: ModelConfig,
    suffix: str = "",
    max_tokens: int | None = None,
) -> list[TextPrompt | TokenPrompt]:
    """Return the prompts of a field: one, or one per element of a list. Raises `RequestError`."""
    special, keep = body.add_special_tokens is not False, body.truncate_prompt_tokens
    if given is None:
        raise invalid(f"{field} is missing; send text, token ids, or a list of either.", field)
    if isinstance(given, str):
        return [TextPrompt(given, special, suffix)]
    if not given:
        raise invalid(f"{field} is []; it must hold at least one text or token id.", field)
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [token_prompt(ids, keep, model, field, max_tokens)]
    if ids:
        raise invalid(
            f"{field} mixes token ids with texts; send one list of ids, a list of texts, or a list of lists of ids.",
            field,
        )
    return [
        TextPrompt(item, special, suffix)
        if isinstance(item, str)
        else token_prompt(item, keep, model, field, max_tokens)
        for item in given
        if not isinstance(item, int)
    ]


def token_prompt(
    ids: Sequence[int],
    truncate_prompt_tokens: int | None,
    model: ModelConfig,
    field: str,
    max_tokens: int | None = None,
) -> TokenPrompt:
    """Return checked ids as a prompt. Raises `RequestError` for ``field``."""
    if truncate_prompt_tokens is None:
        check_length(len(ids), model.max_model_len, field, max_tokens)
    if not ids:
        raise invalid(f"{field} holds an empty list of token ids; send at least one token.", field)
    check_token_ids(ids, model.vocab_size, field)
    return TokenPrompt(pack_i32(ids))


async def token_ids_of(
    service: Service, prompt: TextPrompt | TokenPrompt | ChatPrompt, field: str
) -> Sequence[int]:
    """Return the ids of a prompt. Raises `RequestError` for ``field`` if there are none."""
    encoded = prompt if isinstance(prompt, TokenPrompt) else await service.queries.tokenize(prompt)
    ids = unpack_i32(encoded.token_ids)
    if not ids:
        raise invalid(f"{field} is empty: it has no tokens; send at least one token.", field)
    return ids


async def num_tokens(service: Service, prompt: ChatPrompt) -> int:
    """Return the number of tokens of a prompt, which may exceed the context length."""
    return len((await service.queries.tokenize(prompt)).token_ids) // ID_BYTES
