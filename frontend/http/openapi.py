"""GET /openapi.json: OpenAPI document, generated from the structs that parse the bodies."""

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
from quintet.wire.chat import ChatMessage
from quintet.wire.params import RANGES, SamplingParams

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"


def _limits(name: str) -> Schema:
    """Return the range of a sampling parameter."""
    bounds = RANGES[name]
    limits = {"minimum": bounds.ge, "exclusiveMinimum": bounds.gt, "maximum": bounds.le}
    return {keyword: limit for keyword, limit in limits.items() if limit is not None}


LIMITS: dict[str, Schema] = {
    **{name: _limits(name) for name in RANGES},
    "max_completion_tokens": _limits("max_tokens"),
    "max_output_tokens": _limits("max_tokens"),
    "truncate_prompt_tokens": {**_limits("truncate_prompt_tokens"), "not": {"const": 0}},
    "truncation_side": {"enum": ["left", "right", None]},
    "request_id": {"pattern": "^[!-~]*$", "maxLength": MAX_REQUEST_ID},
    "stream_interval": {"minimum": 1},
    "detokenize": {"const": True},
}
"""Limits enforced by `SamplingParams.checked` and `quintet.frontend.api.openai.parse`."""

_SCHEMA_OF_PARTS = {
    ("ChatBody", "messages"): ChatMessage,
    ("ChatBody", "tools"): SentTool,
    ("ResponsesBody", "tools"): SentTool,
    ("TokenizeBody", "messages"): ChatMessage,
    ("TokenizeBody", "tools"): SentTool,
}

_OPERATIONS: tuple[tuple[str, str, str, type | None, Schema | None], ...] = (
    (
        "post",
        "/v1/completions",
        "Text completion",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0},
    ),
    (
        "post",
        "/v1/chat/completions",
        "Chat completion",
        types.ChatBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/chat/completions/batch",
        "Batch of chat completions; `messages` is a list of conversations",
        types.ChatBody,
        {"messages": [[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "Bye!"}]]},
    ),
    (
        "post",
        "/v1/chat/completions/render",
        "Render a chat request to a body of `/inference/v1/generate`",
        types.ChatBody,
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ),
    (
        "post",
        "/v1/completions/render",
        "Render a completion request to bodies of `/inference/v1/generate`",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):"},
    ),
    (
        "post",
        "/v1/chat/completions/derender",
        "Chat completion from a response of `/inference/v1/generate`",
        generate_types.DerenderChatBody,
        {"generate_response": {"choices": [{"token_ids": [1, 2, 3], "finish_reason": "stop"}]}},
    ),
    (
        "post",
        "/v1/completions/derender",
        "Completion from responses of `/inference/v1/generate`, one per prompt",
        generate_types.DerenderCompletionBody,
        {"generate_responses": [{"choices": [{"token_ids": [1, 2, 3], "finish_reason": "stop"}]}]},
    ),
    (
        "post",
        "/v1/messages",
        "Message (Anthropic API)",
        anthropic_types.MessagesBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/messages/count_tokens",
        "Count the prompt tokens of a conversation",
        anthropic_types.CountTokensBody,
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ),
    (
        "post",
        "/v1/messages/render",
        "Render a message request to a body of `/inference/v1/generate`",
        anthropic_types.MessagesBody,
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ),
    (
        "post",
        "/v1/responses/render",
        "Render a response request to a body of `/inference/v1/generate`",
        responses_types.ResponsesBody,
        {"input": "Hello!", "max_output_tokens": 32},
    ),
    (
        "post",
        "/v1/responses",
        "Response (OpenAI Responses API)",
        responses_types.ResponsesBody,
        {"input": "Hello!", "max_output_tokens": 32},
    ),
    (
        "post",
        "/inference/v1/generate",
        "Generate from token ids to token ids",
        generate_types.GenerateBody,
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "temperature": 0}},
    ),
    (
        "get",
        "/v1/responses/{id}",
        "A stored response; with `stream=true` its events after number `starting_after`",
        None,
        None,
    ),
    ("delete", "/v1/responses/{id}", "Delete a stored response", None, None),
    ("post", "/v1/responses/{id}/cancel", "Cancel a background response", None, None),
    ("get", "/v1/responses/{id}/input_items", "Input items of a response, paged", None, None),
    (
        "post",
        "/v1/conversations",
        "Create a conversation",
        responses_types.ConversationBody,
        {"items": [{"role": "user", "content": "Hello!"}], "metadata": {"topic": "greetings"}},
    ),
    ("get", "/v1/conversations/{id}", "A conversation, without its items", None, None),
    (
        "post",
        "/v1/conversations/{id}",
        "Replace the metadata of a conversation",
        responses_types.ConversationChange,
        {"metadata": {"topic": "weather"}},
    ),
    ("delete", "/v1/conversations/{id}", "Delete a conversation", None, None),
    ("get", "/v1/conversations/{id}/items", "Items of a conversation, paged", None, None),
    (
        "post",
        "/v1/conversations/{id}/items",
        "Append items to a conversation",
        responses_types.ItemsBody,
        {"items": [{"role": "user", "content": "Bye!"}]},
    ),
    ("get", "/v1/conversations/{id}/items/{item_id}", "An item of a conversation", None, None),
    ("delete", "/v1/conversations/{id}/items/{item_id}", "Delete an item of a conversation", None, None),
    (
        "post",
        "/v1/streams",
        "Continue a stream of another server, from its request and the output received so far",
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
        "Resume a stream (header X-Stream-Id) after the position `from`: the part after the colon of the last event id",
        None,
        None,
    ),
    ("get", "/v1/models", "Served model names", None, None),
    ("get", "/v1/models/{id}", "One served model name", None, None),
    ("post", "/tokenize", "Text or conversation to token ids", types.TokenizeBody, {"prompt": "Hello"}),
    ("post", "/detokenize", "Token ids to text", types.DetokenizeBody, {"tokens": [1, 2, 3]}),
    (
        "get",
        "/tokenizer_info",
        "Configuration and chat template of the tokenizer, if enabled",
        None,
        None,
    ),
    ("get", "/health", "200 if every process is healthy, else 503 with the unhealthy ones", None, None),
    ("get", "/livez", "200 while this frontend answers", None, None),
    ("get", "/readyz", "200 while requests can be served", None, None),
    ("get", "/ping", "As /livez", None, None),
    ("post", "/ping", "As /livez", None, None),
    ("get", "/v2/health/live", "As /livez, for clients of KServe and Triton", None, None),
    ("get", "/v2/health/ready", "As /readyz, for clients of KServe and Triton", None, None),
    ("get", "/v2/models/{id}/ready", "200 while requests to the model can be served", None, None),
    (
        "post",
        "/invocations",
        "Chat completion (`messages`) or completion (`prompt`), for SageMaker",
        types.CompletionBody,
        {"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0},
    ),
    ("get", "/version", "Version of the server", None, None),
    ("get", "/load", "Live requests of this frontend", None, None),
    ("get", "/metrics", "Metrics of all processes, in Prometheus text format", None, None),
    (
        "get",
        "/kv",
        "For operators: cached prefixes, most recently used first (`limit`); with `text=true` also as text",
        None,
        None,
    ),
    (
        "post",
        "/kv/pin",
        "For operators: pin a prefix",
        PrefixBody,
        {"prompt": "You are a helpful assistant."},
    ),
    ("post", "/kv/unpin", "For operators: unpin a prefix", PrefixBody, {"id": "c0ffee00"}),
    (
        "post",
        "/kv/evict",
        "For operators: evict a prefix and its extensions",
        PrefixBody,
        {"id": "c0ffee00"},
    ),
    (
        "post",
        "/kv/export",
        "For operators: export a prefix from disk to a file",
        ExportBody,
        {"id": "c0ffee00", "file": "system-prompt.kv"},
    ),
    (
        "post",
        "/kv/import",
        "For operators: import a file's blocks to disk",
        ImportBody,
        {"file": "system-prompt.kv"},
    ),
    ("get", "/openapi.json", "This document", None, None),
    ("get", "/docs", "Interactive documentation", None, None),
    ("get", "/docs/{name}", "Files of the documentation page", None, None),
)


def openapi_document(has_keys: bool, root_path: str = "") -> Schema:
    """Return the OpenAPI 3.1 document of every route."""
    paths: dict[str, Schema] = {}
    for method, path, summary, body, example in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, example, has_keys)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Quintet",
            "version": "1",
            "description": "Inference server for large language models with the OpenAI and Anthropic APIs.",
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
        ChatMessage,
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
        for name, limits in LIMITS.items():
            if name in properties:
                properties[name].update(limits)
        if owner in ("MessagesBody", "ResponsesBody"):
            continue
        for name in types.SHARED_SAMPLING_FIELDS:
            value = getattr(defaults, name)
            if value is not None and not (owner == "ChatBody" and name == "max_tokens"):
                properties[name]["default"] = value
    return schemas


async def openapi(service: Service, http_request: HttpRequest) -> None:
    """Serve the document."""
    config = service.config.frontend
    await http_request.respond_json(openapi_document(bool(config.api_keys), config.root_path))
