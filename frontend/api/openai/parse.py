"""Parsing and checking of request bodies. Errors name the field, its value and the allowed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import msgspec

from quintet.frontend.api.openai.json_errors import (
    INVALID_JSON,
    decode_leniently,
    explain,
    not_json,
    value_of,
)
from quintet.frontend.api.openai.structured import form_of
from quintet.frontend.api.openai.types import (
    FORM_FIELDS,
    SHARED_SAMPLING_FIELDS,
    ChatBody,
    FormFields,
    GenerationBody,
    RawField,
)
from quintet.frontend.http.http_request import MAX_REQUEST_ID, REQUEST_ID, REQUEST_ID_HEADER, HttpRequest
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import MAX_SHOWN, RepetitionDetectionParams, SamplingParams, shown
from quintet.wire.request import model_names

BodyT = TypeVar("BodyT")
NamingT = TypeVar("NamingT", bound="NamesModel")
PartT = TypeVar("PartT")
MAX_CACHE_SALT = 1024
MAX_ID_DIGITS = 10
MAX_TIMEOUT_S = 1_000_000
DEADLINE_HEADER = "x-request-deadline-ms"
"""Milliseconds from arrival to deadline."""
_MILLISECONDS = re.compile(r"[0-9]{1,12}")
_SHARED = frozenset(SHARED_SAMPLING_FIELDS)
_shared_of = attrgetter(*SHARED_SAMPLING_FIELDS)
_forms_of = attrgetter("response_format", *FORM_FIELDS)
_NO_FORM = _forms_of(FormFields())
_MISSING_FIELDS = ("kv_transfer_params", "ec_transfer_params", "watermarking", "moderation")
_MISSING_FLAGS = ("return_token_offsets", "return_prompt_text", "return_weight_versions")
_missing_of = attrgetter(*_MISSING_FIELDS, *_MISSING_FLAGS, "detokenize")
_NOTHING_MISSING = (*[msgspec.UNSET] * len(_MISSING_FIELDS), *[None] * len(_MISSING_FLAGS), None)


class NamesModel(Protocol):
    """A body with a model name."""

    model: str | None


async def read_body(
    service: Service, http_request: HttpRequest, decoder: msgspec.json.Decoder[NamingT]
) -> NamingT:
    """Return the body of a request for a served model. Raises `RequestError`."""
    body = decode(await http_request.read_json_body(service.bodies), decoder)
    if body.model:  # an empty name selects the first one
        check_model(body.model, service.config.model)
    return body


def decode(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Decode a body into its struct. Raises `RequestError` for bad JSON, wrong types and missing fields.

    Numbers and booleans may also be strings (``"5"``, ``"true"``), as some clients send them.
    """
    try:
        return decoder.decode(body)
    except INVALID_JSON:
        return decode_leniently(body, decoder)


def decode_part(raw: RawField, decoder: msgspec.json.Decoder[PartT], name: str) -> PartT:
    """Decode a raw field. Raises `RequestError` with the field's name.

    Also decodes members that the struct skips: the chat template reads them.
    """
    encoded = json_of(raw)
    if not encoded:
        raise invalid(f"{name} is missing; it is required.", name)
    try:
        part = decoder.decode(encoded)
        msgspec.json.decode(encoded)
    except msgspec.ValidationError as error:
        raise explain(error, value_of(encoded, name), name) from None
    except INVALID_JSON as error:
        raise not_json(error, encoded, name) from None
    return part


def json_of(raw: RawField) -> bytes:
    """Return a raw field as JSON; empty if absent or null."""
    encoded = b"" if raw is msgspec.UNSET else bytes(raw)
    return b"" if encoded == b"null" else encoded


def check_model(model: str, config: ModelConfig) -> None:
    """Reject a model that is not served."""
    if model not in model_names(config):
        names = ", ".join(f"`{name}`" for name in model_names(config))
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model `{model[:MAX_SHOWN]}` does not exist. This server serves {names}.",
            "model",
        )


def sampling_params(
    body: GenerationBody, config: ModelConfig, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the body's sampling parameters over the model's defaults, unchecked."""
    values: dict[str, Any] = {n: value for n, value in config.generation_defaults.items() if n in _SHARED}
    sent = zip(SHARED_SAMPLING_FIELDS, _shared_of(body), strict=True)
    values.update([item for item in sent if item[1] is not None])
    if isinstance(body.stop, str):
        values["stop"] = [body.stop]
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if body.use_beam_search:
        values["n"] = 1  # each beam is a request
    elif body.best_of is not None:
        values["n"] = body.best_of
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    if _forms_of(body) != _NO_FORM:
        values["structured_outputs"] = form_of(body)
    if body.repetition_detection is not None:
        watched = msgspec.structs.asdict(body.repetition_detection)
        values["repetition_detection"] = RepetitionDetectionParams(**watched)
    return SamplingParams(**values)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise invalid(
                f"logit_bias has the key {shown(key)}; keys must be token ids, written as strings of digits.",
                "logit_bias",
            )
        bias[int(key)] = value
    return bias


def reject_unsupported(body: GenerationBody) -> None:
    """Reject unsupported fields that would change the output. Call after the checks of supported ones."""
    if _missing_of(body) == _NOTHING_MISSING:  # fast path of almost every request
        return
    for name in _MISSING_FIELDS:
        if json_of(getattr(body, name)) not in {b"", b"{}", b"false"}:
            raise not_implemented(name, f"`{name}`", "Leave it out.")
    for name in _MISSING_FLAGS:
        if getattr(body, name):
            raise not_implemented(name, f"`{name}`", "Leave it out.")
    if body.detokenize is False:
        raise not_implemented(
            "detokenize", "responses without text", "Use `return_token_ids` to get ids as well."
        )


def check_logprob_token_ids(body: GenerationBody, *, has_logprobs: bool) -> None:
    """Reject logprob_token_ids without log-probabilities."""
    if body.logprob_token_ids is not None and not has_logprobs:
        raise invalid("logprob_token_ids was sent without logprobs; send both.", "logprob_token_ids")


def reject_search(body: GenerationBody) -> None:
    """Reject beam search, best_of and suffix at endpoints without them."""
    for name in ("use_beam_search", "suffix"):
        if getattr(body, name, None):
            raise not_implemented(
                name, f"`{name}` at this endpoint", "Leave it out, or send it to /v1/completions."
            )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise not_implemented("best_of", "`best_of` at this endpoint", "Leave it out.")


def check_combinations(body: GenerationBody, config: EngineConfig) -> None:
    """Reject fields that contradict each other or the server's configuration."""
    if body.priority and config.scheduler.policy != "priority":
        raise invalid(
            f"priority is {shown(body.priority)}, but the scheduling policy is first come, first served; leave priority "
            "out, or start the server with --scheduling-policy priority.",
            "priority",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is set but stream is not true; set stream to true.", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs cannot be streamed; set stream to false, or leave prompt_logprobs out.",
            "prompt_logprobs",
        )
    if body.logprob_token_ids == []:
        raise invalid(
            "logprob_token_ids is []; send at least one token id, or leave it out.", "logprob_token_ids"
        )
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT:
        raise invalid(
            f"cache_salt has {len(body.cache_salt)} characters; it must have between 1 and {MAX_CACHE_SALT}.",
            "cache_salt",
        )
    if body.stream_interval is not None and body.stream_interval < 1:
        raise invalid(f"stream_interval is {body.stream_interval}; it must be at least 1.", "stream_interval")


def checked(
    params: SamplingParams, max_logprobs: int | None, model: ModelConfig, names: Mapping[str, str]
) -> SamplingParams:
    """Check and normalize the parameters; errors use the body's field names (``names``: internal to client name)."""
    try:
        return params.checked(max_logprobs, model.vocab_size)
    except RequestError as error:
        raise renamed(error, names) from None


def names_of(body: GenerationBody) -> dict[str, str]:
    """Return the sampling parameters that have another name in this body."""
    return {} if body.best_of is None else {"n": "best_of"}


def max_alternatives(params: SamplingParams) -> int:
    """Return the number of alternatives per position, without the chosen token."""
    return max(params.logprobs or 0, len(params.logprob_token_ids or ()))


def deadline_ns(body: GenerationBody, http_request: HttpRequest) -> int:
    """Return the deadline (monotonic ns): the earlier one of body and header; 0 for none."""
    waits_s: list[float] = []
    if body.timeout is not None:
        if not 0 < body.timeout <= MAX_TIMEOUT_S:
            raise invalid(
                f"timeout is {shown(body.timeout)}; it must be more than 0 and at most {MAX_TIMEOUT_S} seconds.",
                "timeout",
            )
        waits_s.append(body.timeout)
    given = http_request.header(DEADLINE_HEADER)
    if given is not None:
        if not _MILLISECONDS.fullmatch(given) or not 0 < int(given) <= 1000 * MAX_TIMEOUT_S:
            raise invalid(
                f"The header {DEADLINE_HEADER} is {shown(given)}; it must be a whole number of milliseconds, more than 0 "
                f"and at most {1000 * MAX_TIMEOUT_S}."
            )
        waits_s.append(int(given) * 1e-3)
    return http_request.arrival_ns + max(1, int(min(waits_s) * 1e9)) if waits_s else 0


def request_id(body: GenerationBody, http_request: HttpRequest) -> str:
    """Return the id for the response: from the body, else the header, else generated."""
    if body.request_id:
        _check_request_id("request_id", "request_id", body.request_id)
    if http_request.given_id:
        _check_request_id(f"The header {REQUEST_ID_HEADER}", None, http_request.given_id)
    return body.request_id or http_request.request_id


def _check_request_id(name: str, param: str | None, given: str) -> None:
    if not REQUEST_ID.fullmatch(given):
        raise invalid(
            f"{name} is {shown(given)}; it must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces.",
            param,
        )


def chat_max_tokens(body: ChatBody) -> int | None:
    """Return the output limit of a chat request; the newer field takes precedence."""
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def has_upper_bound(body: ChatBody) -> bool:
    """Return whether the output limit is only an upper bound. Truncation leaves room for an explicit limit."""
    return body.truncate_prompt_tokens is None or chat_max_tokens(body) is None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Rename the field of an error to another API's (``names``: internal to client name)."""
    ours = error.param or ""
    if ours not in names or not error.message.startswith(ours):
        return error
    return RequestError(error.code, names[ours] + error.message.removeprefix(ours), names[ours])


def not_implemented(sent: str, what: str, advice: str) -> RequestError:
    """Build a 400 error for an unsupported feature; SDKs would retry a 5xx.

    ``sent`` starts with the field's name.
    """
    field = re.match(r"[\w.]+", sent)
    return RequestError(
        ErrorCode.NOT_IMPLEMENTED,
        f"{sent} was sent, but this server does not support {what}. {advice}",
        field[0] if field is not None else sent,
    )
