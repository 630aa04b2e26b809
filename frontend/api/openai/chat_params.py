"""Sampling parameters and output parsing of a chat request, tool calls included."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.tools import form_of_calls, form_or_calls, reading_of
from quintet.frontend.api.openai.types import ChatBody
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.request import OutputParsing


def params_and_reading(
    body: ChatBody, tools: bytes, config: EngineConfig
) -> tuple[SamplingParams, OutputParsing | None]:
    """Return the sampling parameters and the output parsing of a checked body.

    tools: the functions that the model may call, as JSON. They replace ``body.tools``.
    """
    body.tools = msgspec.Raw(tools) if tools else msgspec.UNSET
    params = _chat_params(body, config)
    return params, reading_of(body, tools, config.model.parsers, params.structured_outputs)


def _chat_params(body: ChatBody, config: EngineConfig) -> SamplingParams:
    """Return the checked sampling parameters of a request. Its tools were checked before."""
    model = config.model
    max_tokens = parse.chat_max_tokens(body)
    if max_tokens is None and "max_tokens" in model.generation_defaults:
        max_tokens = int(model.generation_defaults["max_tokens"])
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = parse.sampling_params(body, model, max_tokens=max_tokens, logprobs=logprobs)
    form = form_of_calls(body, model.parsers.forced)
    is_format = body.response_format is not None and body.response_format.type != "text"
    if form is not None and params.structured_outputs is not None and not is_format:
        raise parse.invalid(
            "tool_choice requires calls, but the request also asks for another output format; send one of them.",
            "tool_choice",
        )
    params.structured_outputs = form or form_or_calls(params.structured_outputs, body, model.parsers)
    names = {"logprobs": "top_logprobs", **parse.names_of(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return parse.checked(params, config.frontend.max_logprobs, model, names)
