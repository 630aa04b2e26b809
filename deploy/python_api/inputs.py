"""Parsing and validation of Python API inputs: prompts, conversations, sampling parameters, adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import msgspec
import numpy as np

from quintet.wire.chat import checked_fields, encode_messages
from quintet.wire.codec import pack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import RANGES, OutputKind, SamplingParams, check_token_ids, out_of_range, shown
from quintet.wire.request import adapter_digest


class PromptDict(TypedDict, total=False):
    """A prompt as a dictionary: exactly one of ``prompt``, ``prompt_token_ids`` and ``prompt_embeds``."""

    prompt: str
    prompt_token_ids: Sequence[int]
    prompt_embeds: object
    """Input embeddings: a tensor or array ``[num_tokens, width]``. Requires ``enable_prompt_embeds``."""
    cache_salt: str


PromptInput = str | Sequence[int] | PromptDict
"""A prompt: text, token ids, or a dictionary with either."""

Message = Mapping[str, object]
Conversation = Sequence[Message]

_PROMPT_KEYS = frozenset(PromptDict.__annotations__)


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in its wire format."""

    prompt: Prompt
    text: str | None
    """Prompt text, repeated in the output."""
    cache_salt: str = ""
    adapter: bytes = b""
    """See `quintet.wire.request.RequestSpec`."""


def read_prompt(given: PromptInput, vocab_size: int) -> ReadPrompt:
    """Parse one prompt. Raises `RequestError` with the given and the allowed forms."""
    if isinstance(given, str):
        return ReadPrompt(TextPrompt(read_text(given, "prompt")), given)
    if isinstance(given, Mapping):
        return _read_dict(given, vocab_size)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(given, vocab_size)), None)
    raise _bad(f"a {type(given).__name__}; pass text, a list of token ids, or a dictionary with either")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that the engine has loaded (``lora_modules``). Only its name matters; the other fields are vLLM's."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def with_adapter(read: ReadPrompt, given: LoRARequest | str | None, model: ModelConfig) -> ReadPrompt:
    """Return the prompt for an adapter, given by its name too. Raises `RequestError` if it is not loaded."""
    if given is None:
        return read
    name = given.lora_name if isinstance(given, LoRARequest) else given
    digest = adapter_digest(model, name)
    if not digest:
        known = ", ".join(f"`{each.name}`" for each in model.adapters) or "none"
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The adapter `{name}` is not loaded; loaded are: {known}. Pass lora_modules=['{name}=PATH'] to the engine.",
            "lora_request",
        )
    return replace(read, adapter=digest)


def is_one_prompt(prompts: object) -> bool:
    """Return whether this is a single prompt, not several."""
    if isinstance(prompts, str | bytes | Mapping):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def read_text(given: str, name: str) -> str:
    """Validate a text. Raises `RequestError` for a lone surrogate."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise _lone_surrogate(name, error) from None
    return given


def _lone_surrogate(name: str, error: UnicodeEncodeError) -> RequestError:
    return invalid(
        f"{name} contains the lone surrogate {error.object[error.start]!r} at character {error.start}; remove it, or decode "
        "the text with errors='replace'.",
        name,
    )


def read_priority(given: int) -> int:
    """Validate a priority. Raises `RequestError`."""
    if not isinstance(given, int) or not -(1 << 63) <= given < 1 << 63:
        raise invalid(
            "priority must be a 64-bit integer, such as 0 or -1.",
            "priority",
        )
    return given


def _encoded(given: object, name: str, encode: Callable[[Any], bytes] = msgspec.json.encode) -> bytes:
    """Encode chat template input. Raises `RequestError` for values that JSON cannot represent."""
    try:
        return encode(msgspec.to_builtins(given, str_keys=True))
    except UnicodeEncodeError as error:
        raise _lone_surrogate(name, error) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid(
            f"{name} cannot be encoded as JSON ({error}); pass strings, numbers, lists and dictionaries with string keys.",
            name,
        ) from None


def _read_dict(given: Mapping[str, object], vocab_size: int) -> ReadPrompt:
    unknown = sorted(str(key) for key in given if key not in _PROMPT_KEYS)
    if unknown:
        raise _bad(
            f"a dictionary with the key {unknown[0]!r}; allowed keys are {', '.join(sorted(_PROMPT_KEYS))}"
        )
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt", "")
    if not isinstance(salt, str):
        raise _bad(f"a dictionary with the cache_salt {salt!r}; it must be a string")
    read_text(salt, "cache_salt")
    if isinstance(text, str) and ids is None:
        return ReadPrompt(TextPrompt(read_text(text, "prompt")), text, salt)
    if text is None and isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return ReadPrompt(TokenPrompt(_pack_ids(ids, vocab_size)), None, salt)
    if given.get("prompt_embeds") is not None and text is None and ids is None:
        return ReadPrompt(_read_embeds(given["prompt_embeds"]), None, salt)
    raise _bad(
        "a dictionary; it must have exactly one of `prompt` (text), `prompt_token_ids` (list of ids) and `prompt_embeds` (tensor)"
    )


def _read_embeds(given: object) -> EmbedsPrompt:
    """Convert a tensor to fp32, which represents all bf16 and fp16 values exactly."""
    detach = getattr(given, "detach", None)
    try:
        numbers = np.ascontiguousarray(
            given if detach is None else detach().cpu().float().numpy(), np.float32
        )
    except (TypeError, ValueError) as error:
        raise _bad(
            f"a dictionary with prompt_embeds of the type {type(given).__name__} ({error}); pass a tensor"
        ) from None
    if numbers.ndim != 2 or not numbers.size:
        raise _bad(
            f"a dictionary with prompt_embeds of the shape {list(numbers.shape)}; it must be [num_tokens, width]"
        )
    return EmbedsPrompt("F32", numbers.shape[1], numbers.tobytes())


def _pack_ids(ids: Sequence[object], vocab_size: int) -> bytes:
    if not ids:
        raise _bad("an empty list; pass at least one token id")
    return pack_i32(read_token_ids(ids, vocab_size, "prompt"))


def read_token_ids(given: Sequence[object], vocab_size: int, name: str = "token_ids") -> list[int]:
    """Validate token ids. Raises `RequestError` for the first invalid one."""
    ids = [token_id for token_id in given if isinstance(token_id, int)]
    if len(ids) < len(given):
        other = next(token_id for token_id in given if not isinstance(token_id, int))
        raise invalid(
            f"{name} contains {shown(other)}; token ids are integers from 0 to {vocab_size - 1}.",
            name,
        )
    check_token_ids(ids, vocab_size, name)
    return ids


def _bad(problem: str) -> RequestError:
    return invalid(f"The prompt is {problem}.", "prompt")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    template_kwargs: Mapping[str, object] | None = None

    def read(self, messages: Conversation) -> ReadPrompt:
        """Convert a conversation to a prompt. Raises `RequestError`."""
        if not messages:
            raise invalid("The conversation is empty; pass at least one message.", "messages")
        encoded = _encoded(messages, "messages", encode_messages)
        try:
            checked_fields(encoded)
        except msgspec.ValidationError as error:
            form = "a message has the form {'role': 'user', 'content': 'Hello'}"
            raise invalid(f"messages is invalid: {error}; {form}.", "messages") from None
        return ReadPrompt(
            ChatPrompt(
                messages=encoded,
                tools=_encoded(self.tools, "tools") if self.tools else b"",
                template_kwargs=_encoded(self.template_kwargs, "chat_template_kwargs")
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
    """Validate field types, and accept a single string for ``stop`` and ``bad_words``. Raises `RequestError`.

    Ranges of values are checked when the request is submitted.
    """
    if not isinstance(given, SamplingParams):
        raise invalid(
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
        raise _invalid_value(str(error), values) from None


_SHAPE = frozenset({"n", "output_kind", "detokenize", "logprobs", "prompt_logprobs", "logprob_token_ids"})
"""Parameters that change the structure of a response."""


def params_by_name(settings: Mapping[str, object], output_kind: OutputKind) -> SamplingParams:
    """Parse sampling parameters of a protocol with single-text responses.

    Raises `RequestError` for unknown parameters, and for those that change the structure of a response.
    """
    known = set(SamplingParams.__struct_fields__) - _SHAPE
    if unknown := sorted(set(settings) - known):
        allowed = ", ".join(sorted(known))
        raise invalid(
            f"{unknown[0]} is not a supported parameter; supported are {allowed}.",
            unknown[0],
        )
    return read_params(SamplingParams(**settings, output_kind=output_kind))  # type: ignore[arg-type]


def instance_by_name(instance: object, common: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Parse a text, or ``{"prompt": …}`` with sampling parameters, which override ``common`` ones.

    Returns the prompt and the merged parameters. Raises `RequestError`.
    """
    fields = {"prompt": instance} if isinstance(instance, str) else instance
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise _bad(f"{shown(instance)}; send a text, or an object with `prompt` and sampling parameters")
    return fields["prompt"], {**common, **{key: fields[key] for key in fields if key != "prompt"}}


def _check_sendable(name: str, value: object) -> None:
    """Reject values that messages cannot encode; the later conversion rejects wrong types."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise invalid(
            f"{name} contains an integer that exceeds 64 bits; pass a smaller one.",
            name,
        ) from None
    except UnicodeEncodeError as error:
        raise _lone_surrogate(name, error) from None
    except TypeError:
        return


def _invalid_value(message: str, values: Mapping[str, object]) -> RequestError:
    """Translate msgspec's ``… - at `$[3]` `` to an error with the field's name and value."""
    problem, _, path = message.partition(" - at `$[")
    index = path.split("]")[0]
    if index.isdigit():
        name = list(values)[int(index)]
        if name in RANGES and isinstance(values[name], int | float):
            return out_of_range(name, values[name])
        message = f"{name} is {values[name]!r}: {problem[:1].lower()}{problem[1:]}."
    return invalid(message, "sampling_params")


def default_params(generation_defaults: Mapping[str, float | int]) -> SamplingParams:
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in generation_defaults.items() if name in known})  # type: ignore[arg-type]
