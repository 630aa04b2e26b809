"""Rows of the route table, and the OpenAPI document generated from them and from the structs that parse the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from quintet.frontend.api.anthropic.types import MessagesErrorBody
from quintet.frontend.api.openai import errors as openai_errors
from quintet.frontend.api.openai import types
from quintet.frontend.api.openai.offered_tools import SentTool
from quintet.frontend.api.responses.types import InputItem
from quintet.frontend.http.auth import is_open, is_operators
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import MAX_REQUEST_ID
from quintet.frontend.service import Handler
from quintet.wire.chat import ChatMessage
from quintet.wire.params import RANGES, SamplingParams

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
JSON, TEXT, HTML, EVENTS, ANY = "application/json", "text/plain", "text/html", "text/event-stream", "*/*"


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


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a route."""

    method: str
    summary: str
    body: type[msgspec.Struct] | None = None
    example: Schema | None = None
    """A body."""


get, post, delete = (partial(Operation, method) for method in ("get", "post", "delete"))


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the route table."""

    path: str
    handler: Handler
    operations: tuple[Operation, ...]
    fields: tuple[str, ...] = ()
    """Required fields of a JSON response."""
    content: str = JSON
    """Content type of a response."""
    is_list: bool = False
    """The JSON response is a list of such objects."""
    is_streamed: bool = False
    """The response can also be events."""
    answers_503: bool = False
    """A response with status 503 has these fields too."""
    errors: ErrorShape = openai_errors.ERRORS
    """Error format of the path's API."""

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(operation.method.upper() for operation in self.operations)


def route(path: str, handler: Handler, *operations: Operation, **described: Any) -> RouteSpec:
    """Build a row. ``described``: further fields of `RouteSpec`."""
    return RouteSpec(path, handler, operations, **described)


def openapi_document(routes: Sequence[RouteSpec], has_keys: bool, root_path: str = "") -> Schema:
    """Return the OpenAPI 3.1 document of every route."""
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Quintet",
            "version": "1",
            "description": "Inference server for large language models with the OpenAI and Anthropic APIs.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": {
            row.path.replace(":path", ""): {
                operation.method: _operation(row, operation, has_keys) for operation in row.operations
            }
            for row in routes
        },
        "components": {"schemas": _schemas(routes)},
    }
    schemes = document["components"]["securitySchemes"] = {"operator": {"type": "http", "scheme": "bearer"}}
    if has_keys:
        schemes["key"] = {"type": "http", "scheme": "bearer"}
    return document


def _operation(row: RouteSpec, operation: Operation, has_keys: bool) -> Schema:
    path = row.path.replace(":path", "")
    described: Schema = {"summary": operation.summary, "responses": _responses(row)}
    if operation.body is not None:
        schema = {"$ref": REF.format(name=operation.body.__name__)}
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema, "example": operation.example}},
        }
    names = re.findall(r"{(\w+)}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if is_operators(path):
        described["security"] = [{"operator": []}]
    elif has_keys and not is_open(path):
        described["security"] = [{"key": []}]
    return described


def _responses(row: RouteSpec) -> Schema:
    shape = "ErrorBody" if row.errors is openai_errors.ERRORS else "MessagesErrorBody"
    error = {"content": {JSON: {"schema": {"$ref": REF.format(name=shape)}}}}
    answer = {"content": _content(row)}
    described = {
        "200": {"description": "Success", **answer},
        "4XX": {"description": "Rejected request", **error},
        "5XX": {"description": "Server error; retry later or report it", **error},
    }
    if row.answers_503:
        described["503"] = {"description": "Not ready or unhealthy", **answer}
    return described


def _content(row: RouteSpec) -> Schema:
    if row.content != JSON:
        return {row.content: {"schema": {}}}
    schema: Schema = {"type": "object", "required": list(row.fields)}
    content: Schema = {JSON: {"schema": {"type": "array", "items": schema} if row.is_list else schema}}
    if row.is_streamed:
        content[EVENTS] = {"schema": {"type": "object", "required": ["data"]}}
    return content


def _schemas(routes: Sequence[RouteSpec]) -> dict[str, Schema]:
    bodies = [each.body for row in routes for each in row.operations if each.body is not None]
    structs = dict.fromkeys(
        [*bodies, *_SCHEMA_OF_PARTS.values(), InputItem, types.ErrorBody, MessagesErrorBody]
    )
    _, schemas = msgspec.json.schema_components(list(structs), ref_template=REF)
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
