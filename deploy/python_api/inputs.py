"""What users of the Python API may pass: prompts in their several forms, conversations, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import numpy as np

from quintet.wire.codec import pack_i32
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import OutputKind, SamplingParams, check_token_ids, shown


class PromptDict(TypedDict, total=False):
    """A prompt as a dictionary: exactly one of ``prompt``, ``prompt_token_ids`` and ``prompt_embeds``."""

    prompt: str
    prompt_token_ids: Sequence[int]
    prompt_embeds: object
    """A tensor or array ``[tokens, width]``: rows of the model's embedding table, or what stands in their place. Needs
    ``enable_prompt_embeds``."""
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
        return ReadPrompt(TextPrompt(read_text(given, "prompt")), given)
    if isinstance(given, Mapping):
        return _read_dict(given, vocab_size)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(given, vocab_size)), None)
    raise _bad(f"a {type(given).__name__}; pass text, a list of token ids, or a dictionary with either")


def read_text(given: str, name: str) -> str:
    """Return a text that can be sent. Raises `RequestError` for one with half of a surrogate pair."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise _half_pair(name, error) from None
    return given


def _half_pair(name: str, error: UnicodeEncodeError) -> RequestError:
    return RequestError(
        ErrorCode.INVALID,
        f"{name} holds {error.object[error.start]!r} at character {error.start}, half of a surrogate pair, which is not "
        "text; drop it, or read the text again with errors='replace'.",
        name,
    )


def read_priority(given: int) -> int:
    """Return a priority that can be sent. Raises `RequestError`."""
    if not isinstance(given, int) or not -(1 << 63) <= given < 1 << 63:
        raise RequestError(
            ErrorCode.INVALID,
            "priority is not a 64-bit whole number; pass a small one, such as 0 or -1.",
            "priority",
        )
    return given


def _json(given: object, name: str) -> bytes:
    """Return as JSON what goes to the chat template. Raises `RequestError` for what JSON cannot hold."""
    try:
        return msgspec.json.encode(given)
    except UnicodeEncodeError as error:
        raise _half_pair(name, error) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            ErrorCode.INVALID,
            f"{name} cannot be written as JSON ({error}); pass text, numbers, lists and dictionaries with text keys.",
            name,
        ) from None


def _read_dict(given: Mapping[str, object], vocab_size: int) -> ReadPrompt:
    unknown = sorted(str(key) for key in given if key not in _PROMPT_KEYS)
    if unknown:
        raise _bad(f"a dictionary with {unknown[0]!r}; its keys may be {', '.join(sorted(_PROMPT_KEYS))}")
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt", "")
    if not isinstance(salt, str):
        raise _bad(f"a dictionary whose cache_salt is {salt!r}; it must be text")
    read_text(salt, "cache_salt")
    if isinstance(text, str) and ids is None:
        return ReadPrompt(TextPrompt(read_text(text, "prompt")), text, salt)
    if text is None and isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(ids, vocab_size)), None, salt)
    if given.get("prompt_embeds") is not None and text is None and ids is None:
        return ReadPrompt(_read_embeds(given["prompt_embeds"]), None, salt)
    raise _bad(
        "a dictionary that must have one of `prompt` (text), `prompt_token_ids` (a list of ids) and `prompt_embeds` (a tensor)"
    )


def _read_embeds(given: object) -> EmbedsPrompt:
    """Return a tensor's numbers, in fp32: it holds every number of bf16 and fp16."""
    detach = getattr(given, "detach", None)
    try:
        numbers = np.ascontiguousarray(
            given if detach is None else detach().cpu().float().numpy(), np.float32
        )
    except (TypeError, ValueError) as error:
        raise _bad(
            f"a dictionary whose prompt_embeds is a {type(given).__name__} ({error}); pass a tensor"
        ) from None
    if numbers.ndim != 2 or not numbers.size:
        raise _bad(
            f"a dictionary whose prompt_embeds has the shape {list(numbers.shape)}; it must be [tokens, width]"
        )
    return EmbedsPrompt("F32", numbers.shape[1], numbers.tobytes())


def _pack_ids(ids: Sequence[object], vocab_size: int) -> bytes:
    if not ids:
        raise _bad("an empty list; pass at least one token id")
    return pack_i32(read_token_ids(ids, vocab_size, "prompt"))


def read_token_ids(given: Sequence[object], vocab_size: int, name: str = "token_ids") -> list[int]:
    """Return token ids of the vocabulary. Raises `RequestError` for the first that is none."""
    ids = [token_id for token_id in given if isinstance(token_id, int)]
    if len(ids) < len(given):
        stranger = next(token_id for token_id in given if not isinstance(token_id, int))
        raise RequestError(
            ErrorCode.INVALID,
            f"{name} holds {shown(stranger)}; token ids are whole numbers from 0 to {vocab_size - 1}.",
            name,
        )
    check_token_ids(ids, vocab_size, name)
    return ids


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
                messages=_json(messages, "messages"),
                tools=_json(self.tools, "tools") if self.tools else b"",
                template_kwargs=_json(self.template_kwargs, "chat_template_kwargs")
                if self.template_kwargs
                else b"",
                chat_template=None
                if self.chat_template is None
                else read_text(self.chat_template, "chat_template"),
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
    for name, value in values.items():
        _check_sendable(name, value)
    try:
        return msgspec.convert(list(values.values()), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(ErrorCode.INVALID, _reworded(str(error), values), "sampling_params") from None


_SHAPE = frozenset({"n", "output_kind", "detokenize", "logprobs", "prompt_logprobs", "logprob_token_ids"})
"""Parameters that change what an answer consists of."""


def params_by_name(settings: Mapping[str, object], output_kind: OutputKind) -> SamplingParams:
    """Read what another server's protocol, whose answers are one text, brings beside a prompt.

    Raises `RequestError` for a name that is none, or asks for more than a text.
    """
    known = set(SamplingParams.__struct_fields__) - _SHAPE
    if strange := sorted(set(settings) - known):
        allowed = ", ".join(sorted(known))
        raise RequestError(
            ErrorCode.INVALID, f"{strange[0]} is no parameter here; there are {allowed}.", strange[0]
        )
    return read_params(SamplingParams(**settings, output_kind=output_kind))  # type: ignore[arg-type]


def instance_by_name(instance: object, common: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Read a prompt as those protocols bring it, a text or ``{"prompt": …}`` with parameters beside it, over ``common`` ones.

    Raises `RequestError`.
    """
    own = {"prompt": instance} if isinstance(instance, str) else instance
    if not isinstance(own, dict) or not isinstance(own.get("prompt"), str):
        raise _bad(
            f"{shown(instance)}; send a text, or a mapping with `prompt` and sampling parameters beside it"
        )
    return own["prompt"], {**common, **{key: own[key] for key in own if key != "prompt"}}


def _check_sendable(name: str, value: object) -> None:
    """Reject what no message can hold; wrong types are left to the conversion that follows."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise RequestError(
            ErrorCode.INVALID,
            f"{name} holds a whole number that does not fit into 64 bits; pass a smaller one.",
            name,
        ) from None
    except UnicodeEncodeError as error:
        raise _half_pair(name, error) from None
    except TypeError:
        return


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
