"""GET /openapi.json: the API described from the structs that parse it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quintet.frontend.api.anthropic import types as anthropic_types
from quintet.frontend.api.inference import types as generate_types
from quintet.frontend.api.openai import types
from quintet.frontend.api.openai.offered_tools import SentTool
from quintet.frontend.api.responses import types as responses_types
from quintet.frontend.http.auth import is_open, is_operators
from quintet.frontend.http.http_request import MAX_REQUEST_ID, HttpRequest
from quintet.frontend.http.openapi_responses import responses
from quintet.frontend.kv import ExportBody, ImportBody, PrefixBody
from quintet.frontend.resume.continue_stream import ContinueStreamBody
from quintet.frontend.service import Service
from quintet.wire.params import (
    MAX_CHOICES,
    MAX_COUNT,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"

RANGES: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_COUNT},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 1, "maximum": MAX_COUNT},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_COUNT},
    "max_output_tokens": {"minimum": 1, "maximum": MAX_COUNT},
    "min_tokens": {"minimum": 0, "maximum": MAX_COUNT},
    "truncate_prompt_tokens": {"minimum": -1, "maximum": MAX_COUNT, "not": {"const": 0}},
    "truncation_side": {"enum": ["left", "right", None]},
    "request_id": {"pattern": "^[!-~]*$", "maxLength": MAX_REQUEST_ID},
    "stream_interval": {"minimum": 1},
    "detokenize": {"const": True},
}
"""What is enforced by `SamplingParams.checked` and `quintet.frontend.api.openai.parse`, for readers."""

_SCHEMA_OF_PARTS = {
    ("ChatBody", "messages"): types.ChatMessage,
    ("ChatBody", "tools"): SentTool,
    ("ResponsesBody", "tools"): SentTool,
    ("TokenizeBody", "messages"): types.ChatMessage,
    ("TokenizeBody", "tools"): SentTool,
}

_OPERATIONS: tuple[tuple[str, str, str, type | None, Schema | None], ...] = (
    (
        "post",
        "/v1/completions",
        "Complete a text",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0},
    ),
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        types.ChatBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/chat/completions/batch",
        "Answer several conversations: `messages` is a list of them",
        types.ChatBody,
        {"messages": [[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "Bye!"}]]},
    ),
    (
        "post",
        "/v1/chat/completions/render",
        "What a conversation is to `/inference/v1/generate`",
        types.ChatBody,
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ),
    (
        "post",
        "/v1/completions/render",
        "What the prompts of a completion are to `/inference/v1/generate`",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):"},
    ),
    (
        "post",
        "/v1/chat/completions/derender",
        "The answer of a conversation, from what `/inference/v1/generate` answered",
        generate_types.DerenderChatBody,
        {"generate_response": {"choices": [{"token_ids": [1, 2, 3], "finish_reason": "stop"}]}},
    ),
    (
        "post",
        "/v1/completions/derender",
        "The answer of a completion, from what `/inference/v1/generate` answered for each prompt",
        generate_types.DerenderCompletionBody,
        {"generate_responses": [{"choices": [{"token_ids": [1, 2, 3], "finish_reason": "stop"}]}]},
    ),
    (
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's dialect",
        anthropic_types.MessagesBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/messages/count_tokens",
        "How many tokens the prompt of such a conversation has",
        anthropic_types.CountTokensBody,
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ),
    (
        "post",
        "/v1/messages/render",
        "What such a conversation is to `/inference/v1/generate`",
        anthropic_types.MessagesBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/responses/render",
        "What such items are to `/inference/v1/generate`",
        responses_types.ResponsesBody,
        {"input": "Hello!", "max_output_tokens": 32},
    ),
    (
        "post",
        "/v1/responses",
        "Answer items of a conversation with items",
        responses_types.ResponsesBody,
        {"input": "Hello!", "max_output_tokens": 32},
    ),
    (
        "post",
        "/inference/v1/generate",
        "Go on with token ids, in token ids",
        generate_types.GenerateBody,
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "temperature": 0}},
    ),
    (
        "get",
        "/v1/responses/{id}",
        "A response that is kept; with `stream=true` its events behind number `starting_after`",
        None,
        None,
    ),
    ("delete", "/v1/responses/{id}", "Keep it no longer", None, None),
    ("post", "/v1/responses/{id}/cancel", "End a response that is answered in the background", None, None),
    ("get", "/v1/responses/{id}/input_items", "What it was asked with, by pages", None, None),
    (
        "post",
        "/v1/conversations",
        "Keep items under a name",
        responses_types.ConversationBody,
        {"items": [{"role": "user", "content": "Hello!"}], "metadata": {"topic": "greetings"}},
    ),
    ("get", "/v1/conversations/{id}", "A conversation, without its items", None, None),
    (
        "post",
        "/v1/conversations/{id}",
        "Give it other metadata",
        responses_types.ConversationChange,
        {"metadata": {"topic": "weather"}},
    ),
    ("delete", "/v1/conversations/{id}", "Keep it no longer", None, None),
    ("get", "/v1/conversations/{id}/items", "Its items, by pages", None, None),
    (
        "post",
        "/v1/conversations/{id}/items",
        "Append items",
        responses_types.ItemsBody,
        {"items": [{"role": "user", "content": "Bye!"}]},
    ),
    ("get", "/v1/conversations/{id}/items/{item_id}", "One of its items", None, None),
    ("delete", "/v1/conversations/{id}/items/{item_id}", "Take an item out", None, None),
    (
        "post",
        "/v1/streams",
        "Go on with a stream that began at another server: its request, and what was told of its answer",
        ContinueStreamBody,
        {
            "path": "/v1/completions",
            "request": {"prompt": "Once", "stream": True, "max_tokens": 8},
            "position": "2",
            "outputs": [[11, 12]],
            "seeds": [7],
            "created": 1700000000,
        },
    ),
    (
        "get",
        "/v1/streams/{id}",
        "The rest of a stream (header X-Stream-Id) after the position `from`: what its last event's id says after the colon",
        None,
        None,
    ),
    ("get", "/v1/models", "The names the model is served under", None, None),
    ("get", "/v1/models/{id}", "One of those names", None, None),
    ("post", "/tokenize", "Text or conversation to token ids", types.TokenizeBody, {"prompt": "Hello"}),
    ("post", "/detokenize", "Token ids to text", types.DetokenizeBody, {"tokens": [1, 2, 3]}),
    (
        "get",
        "/tokenizer_info",
        "The tokenizer's configuration and chat template, if that is allowed",
        None,
        None,
    ),
    ("get", "/health", "200 while every process is well, else 503 naming those that are not", None, None),
    ("get", "/livez", "200 while this process answers", None, None),
    ("get", "/readyz", "200 while requests can be served", None, None),
    ("get", "/ping", "As /livez", None, None),
    ("post", "/ping", "As /livez", None, None),
    ("get", "/v2/health/live", "As /livez, for clients of KServe and Triton", None, None),
    ("get", "/v2/health/ready", "As /readyz, for the same", None, None),
    ("get", "/v2/models/{id}/ready", "200 while requests to the model can be served", None, None),
    (
        "post",
        "/invocations",
        "A conversation (`messages`) or a text (`prompt`), as at their own paths",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0},
    ),
    ("get", "/version", "The version of the server", None, None),
    ("get", "/load", "Requests this frontend holds", None, None),
    ("get", "/metrics", "Figures of every process, as Prometheus text", None, None),
    (
        "get",
        "/kv",
        "For operators: prefixes in KV memory, used last first (`limit`); with `text=true` in words too",
        None,
        None,
    ),
    (
        "post",
        "/kv/pin",
        "For operators: keep a prefix",
        PrefixBody,
        {"prompt": "You are a helpful assistant."},
    ),
    ("post", "/kv/unpin", "For operators: keep it no longer", PrefixBody, {"id": "c0ffee00"}),
    (
        "post",
        "/kv/evict",
        "For operators: forget a prefix, and all that begins with it",
        PrefixBody,
        {"id": "c0ffee00"},
    ),
    (
        "post",
        "/kv/export",
        "For operators: write a prefix that is on disk into a file",
        ExportBody,
        {"id": "c0ffee00", "file": "system-prompt.kv"},
    ),
    (
        "post",
        "/kv/import",
        "For operators: bring such a file's blocks to the disk",
        ImportBody,
        {"file": "system-prompt.kv"},
    ),
    ("get", "/openapi.json", "This document", None, None),
    ("get", "/docs", "This document, readable", None, None),
    ("get", "/docs/{name}", "What that page is made of", None, None),
)


def openapi_document(has_keys: bool, root_path: str = "") -> Schema:
    """Return the OpenAPI 3.1 description of every route."""
    paths: dict[str, Schema] = {}
    for method, path, summary, body, example in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, example, has_keys)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Quintet",
            "version": "1",
            "description": "A server for large language models that speaks OpenAI's and Anthropic's dialects.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    schemes = document["components"]["securitySchemes"] = {"operator": {"type": "http", "scheme": "bearer"}}
    if has_keys:
        schemes["key"] = {"type": "http", "scheme": "bearer"}
    return document


def _operation(path: str, summary: str, body: type | None, example: Schema | None, has_keys: bool) -> Schema:
    shape = "MessagesErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
    error = {"content": {"application/json": {"schema": {"$ref": REF.format(name=shape)}}}}
    operation: Schema = {
        "summary": summary,
        "responses": responses(path, error),
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": REF.format(name=body.__name__)}, "example": example}
            },
        }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if is_operators(path):
        operation["security"] = [{"operator": []}]
    elif has_keys and not is_open(path):
        operation["security"] = [{"key": []}]
    return operation


def _schemas() -> dict[str, Schema]:
    structs = (
        types.CompletionBody,
        types.ChatBody,
        types.TokenizeBody,
        types.DetokenizeBody,
        types.ChatMessage,
        SentTool,
        types.ErrorBody,
        ContinueStreamBody,
        PrefixBody,
        ExportBody,
        ImportBody,
        generate_types.GenerateBody,
        generate_types.DerenderChatBody,
        generate_types.DerenderCompletionBody,
        responses_types.ResponsesBody,
        responses_types.ConversationBody,
        responses_types.ConversationChange,
        responses_types.ItemsBody,
        responses_types.InputItem,
        anthropic_types.MessagesBody,
        anthropic_types.CountTokensBody,
        anthropic_types.MessagesErrorBody,
    )
    _, schemas = msgspec.json.schema_components(structs, ref_template=REF)
    for (owner, name), part in _SCHEMA_OF_PARTS.items():
        reference = {"$ref": REF.format(name=part.__name__)}
        schemas[owner]["properties"][name] = {"type": "array", "items": reference}
    items = {"type": "array", "items": {"$ref": REF.format(name="InputItem")}}
    schemas["ResponsesBody"]["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}
    defaults = SamplingParams()
    for owner in ("CompletionBody", "ChatBody", "MessagesBody", "ResponsesBody"):
        properties = schemas[owner]["properties"]
        for name, limits in RANGES.items():
            if name in properties:
                properties[name].update(limits)
        if owner in ("MessagesBody", "ResponsesBody"):
            continue
        for name in types.SHARED_SAMPLING_FIELDS:
            value = getattr(defaults, name)
            if value is not None and not (owner == "ChatBody" and name == "max_tokens"):
                properties[name]["default"] = value
    return schemas


async def openapi(service: Service, exchange: HttpRequest) -> None:
    """Answer with the document."""
    config = service.config.frontend
    await exchange.respond_json(openapi_document(bool(config.api_keys), config.root_path))
