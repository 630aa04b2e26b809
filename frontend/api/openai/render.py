"""POST …/render: translate a request to the body of `/inference/v1/generate`, with token ids and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat_body import checked_chat, prompt_of
from quintet.frontend.api.openai.chat_body import reject_unsupported as reject_unsupported_in_chat
from quintet.frontend.api.openai.completions import completion_params
from quintet.frontend.api.openai.prompts import parse_prompts, token_ids_of
from quintet.frontend.api.openai.types import ChatBody, CompletionBody, GenerationBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import ChatPrompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import check_length, name_in_responses
from quintet.wire.structured import StructuredOutputsParams

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)

NOT_SENT = frozenset({"output_kind", "detokenize", "structured_outputs", "truncate_prompt_tokens"})
"""Parameters that `/inference/v1/generate` does not take, or that are sent in another form."""


async def render_chat(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _chat_decoder)
    conversation, params, _ = checked_chat(body, config)
    prompt = prompt_of(body, conversation, config)
    reject_unsupported_in_chat(body)
    parse.reject_search(body)
    await respond_rendered(service, http_request, body, prompt, params)


async def respond_rendered(
    service: Service,
    http_request: HttpRequest,
    chat: ChatBody,
    prompt: ChatPrompt | TokenPrompt,
    params: SamplingParams,
) -> None:
    """Answer with the rendered request of a conversation. Its output limit is only an upper bound.

    ``params.max_tokens`` is reduced to the rest of the context.
    """
    ids = await _ids_of(prompt, None, service, "messages")
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, service.config.model.max_model_len - len(ids))
    await http_request.respond_json(_rendered(ids, chat, params, http_request, service.config))


async def render_completions(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/completions/render: one rendered request per prompt."""
    config = service.config
    body = await parse.read_body(service, http_request, _completion_decoder)
    parse.check_combinations(body, config)
    parse.check_logprob_token_ids(body, has_logprobs=body.logprobs is not None)
    if body.prompt_embeds:
        raise invalid("prompt_embeds cannot be rendered to token ids; leave it out.", "prompt_embeds")
    prompts = parse_prompts(body.prompt, "prompt", body, config.model, body.suffix or "")
    params = completion_params(body, config)
    parse.reject_unsupported(body)
    parse.reject_search(body)
    rendered = []
    for prompt in prompts:
        ids = await _ids_of(prompt, body.max_tokens, service, "prompt")
        rendered.append(_rendered(ids, body, params, http_request, config))
    await http_request.respond_json(rendered)


async def _ids_of(
    prompt: TextPrompt | TokenPrompt | ChatPrompt, max_tokens: int | None, service: Service, field: str
) -> Sequence[int]:
    """Return a prompt's ids. Raises `RequestError` if prompt and output exceed the context length."""
    ids = await token_ids_of(service, prompt, field)
    check_length(len(ids), service.config.model.max_model_len, field, max_tokens)
    return ids


def _rendered(
    ids: Sequence[int],
    body: GenerationBody,
    params: SamplingParams,
    http_request: HttpRequest,
    config: EngineConfig,
) -> dict[str, object]:
    if params.truncate_prompt_tokens is not None:
        raise parse.not_implemented(
            "truncate_prompt_tokens",
            "truncation of rendered prompts",
            "Truncate the ids.",
        )
    return {
        "request_id": parse.request_id(body, http_request),
        "token_ids": list(ids),
        "sampling_params": _params_json(params),
        "model": name_in_responses(config.model, body.model),
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else msgspec.to_builtins(body.stream_options),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }


def _params_json(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults, by name."""
    params_json = {
        name: value for name, value in _changed(params, SamplingParams()).items() if name not in NOT_SENT
    }
    params_json["max_tokens"] = params.max_tokens
    form = params.structured_outputs
    if params.repetition_detection is not None:
        params_json["repetition_detection"] = msgspec.structs.asdict(params.repetition_detection)
    if form is not None:
        params_json["structured_outputs"] = _changed(form, StructuredOutputsParams())
    return params_json


def _changed(given: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that differ from a default."""
    as_default = msgspec.structs.asdict(default)
    return {name: value for name, value in msgspec.structs.asdict(given).items() if value != as_default[name]}
