"""What users of the Python API may pass: prompts in their several forms, conversations, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams


class PromptDict(TypedDict, total=False):
    """A prompt as a dictionary: exactly one of ``prompt`` and ``prompt_token_ids``."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


PromptInput = str | Sequence[int] | PromptDict
"""A prompt: text, token ids, or a dictionary with either."""

Message = Mapping[str, object]
Conversation = Sequence[Message]

_PROMPT_KEYS = frozenset(PromptDict.__annotations__)


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in the form processes exchange."""

    prompt: Prompt
    text: str | None
    """As given, to be echoed in the output."""
    cache_salt: str = ""


def read_prompt(given: PromptInput, vocab_size: int) -> ReadPrompt:
    """Understand one prompt. Raises `RequestError` saying what was passed and what may be."""
    if isinstance(given, str):
        return ReadPrompt(TextPrompt(given), given)
    if isinstance(given, Mapping):
        return _read_dict(given, vocab_size)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(given, vocab_size)), None)
    raise _bad(f"a {type(given).__name__}; pass text, a list of token ids, or a dictionary with either")


def _read_dict(given: Mapping[str, object], vocab_size: int) -> ReadPrompt:
    unknown = sorted(str(key) for key in given if key not in _PROMPT_KEYS)
    if unknown:
        raise _bad(f"a dictionary with {unknown[0]!r}; its keys may be {', '.join(sorted(_PROMPT_KEYS))}")
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt", "")
    if not isinstance(salt, str):
        raise _bad(f"a dictionary whose cache_salt is {salt!r}; it must be text")
    if isinstance(text, str) and ids is None:
        return ReadPrompt(TextPrompt(text), text, salt)
    if text is None and isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(ids, vocab_size)), None, salt)
    raise _bad("a dictionary that must have either `prompt` (text) or `prompt_token_ids` (a list of ids)")


def _pack_ids(ids: Sequence[object], vocab_size: int) -> bytes:
    if not ids:
        raise _bad("an empty list; pass at least one token id")
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise _bad(f"a list with {token_id!r}; token ids are whole numbers from 0 to {vocab_size - 1}")
    return pack_i32(token_id for token_id in ids if isinstance(token_id, int))


def _bad(what: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"The prompt is {what}.", "prompt")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How conversations become prompts."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    template_kwargs: Mapping[str, object] | None = None

    def read(self, messages: Conversation) -> ReadPrompt:
        """Return one conversation as a prompt. Raises `RequestError`."""
        if not messages:
            raise RequestError(
                ErrorCode.INVALID, "The conversation is empty; pass at least one message.", "messages"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    ErrorCode.INVALID,
                    f"The conversation holds {message!r}; a message looks like "
                    "{'role': 'user', 'content': 'Hello'}.",
                    "messages",
                )
        return ReadPrompt(
            ChatPrompt(
                messages=msgspec.json.encode(messages),
                tools=msgspec.json.encode(self.tools) if self.tools else b"",
                template_kwargs=msgspec.json.encode(self.template_kwargs) if self.template_kwargs else b"",
                chat_template=self.chat_template,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
            ),
            None,
        )


def read_params(given: SamplingParams) -> SamplingParams:
    """Check the types of the fields, and accept a lone string for ``stop`` and ``bad_words``.

    The values' ranges are checked where the request is submitted. Raises `RequestError`.
    """
    if not isinstance(given, SamplingParams):
        raise RequestError(
            ErrorCode.INVALID,
            f"sampling_params is {given!r}; pass SamplingParams(...), or a list with one per prompt.",
            "sampling_params",
        )
    values = msgspec.structs.asdict(given)
    for name in ("stop", "bad_words"):
        value = values[name]
        values[name] = [value] if isinstance(value, str) else list(value or ())
    try:
        return msgspec.convert(list(values.values()), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(ErrorCode.INVALID, _reworded(str(error), values), "sampling_params") from None


def _reworded(words: str, values: Mapping[str, object]) -> str:
    """Turn msgspec's ``… - at `$[3]` `` into the name of the field and its value."""
    what, _, where = words.partition(" - at `$[")
    index = where.split("]")[0]
    if not index.isdigit():
        return words
    name = list(values)[int(index)]
    return f"{name} is {values[name]!r}: {what[:1].lower()}{what[1:]}."


def default_params(generation_defaults: Mapping[str, float | int]) -> SamplingParams:
    """Return the parameters of a call that brings none: the model's own sampling defaults."""
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in generation_defaults.items() if name in known})  # type: ignore[arg-type]
