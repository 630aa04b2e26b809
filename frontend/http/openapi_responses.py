"""Responses in the OpenAPI document: content types and required fields."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

JSON, TEXT, HTML, EVENTS, ANY = "application/json", "text/plain", "text/html", "text/event-stream", "*/*"

_CHOICES = ("id", "object", "created", "model", "choices", "usage")
_RENDERED = ("request_id", "token_ids", "sampling_params", "model")
_RESPONSE = ("id", "object", "created_at", "status", "model", "output")
_CONVERSATION = ("id", "object", "created_at", "metadata")
_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/completions": _CHOICES,
    "/v1/chat/completions": _CHOICES,
    "/v1/chat/completions/batch": _CHOICES,
    "/invocations": _CHOICES,
    "/v1/chat/completions/render": _RENDERED,
    "/v1/chat/completions/derender": _CHOICES,
    "/v1/completions/derender": _CHOICES,
    "/inference/v1/generate": ("request_id", "choices", "usage"),
    "/v1/messages": ("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/v1/messages/render": _RENDERED,
    "/v1/responses": _RESPONSE,
    "/v1/responses/render": _RENDERED,
    "/v1/responses/{id}/cancel": _RESPONSE,
    "/v1/conversations": _CONVERSATION,
    "/v1/conversations/{id}": ("id", "object"),
    "/v1/conversations/{id}/items": ("object", "data", "has_more"),
    "/v1/models": ("object", "data"),
    "/v1/models/{id}": ("id", "object", "created", "owned_by"),
    "/tokenize": ("count", "max_model_len", "tokens"),
    "/detokenize": ("prompt",),
    "/health": ("status", "processes", "missing"),
    "/readyz": ("ready", "missing", "draining"),
    "/v2/health/live": ("live",),
    "/v2/health/ready": ("ready",),
    "/v2/models/{id}/ready": ("name", "ready"),
    "/version": ("version",),
    "/load": ("server_load",),
    "/kv": ("object", "data", "has_more", "engines"),
    "/kv/pin": ("object", "data"),
    "/kv/unpin": ("object", "data"),
    "/kv/evict": ("object", "data"),
    "/kv/export": ("object", "data", "file", "bytes"),
    "/kv/import": ("object", "data", "file"),
    "/openapi.json": ("openapi", "paths"),
}
_STREAMED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/{id}",
        "/inference/v1/generate",
        "/invocations",
    }
)
_OTHER_KINDS = {
    "/livez": TEXT,
    "/ping": TEXT,
    "/metrics": TEXT,
    "/docs": HTML,
    "/docs/{name}": ANY,
    "/v1/streams": EVENTS,
    "/v1/streams/{id}": EVENTS,
}
_OWN_BODY_ON_503 = frozenset({"/health", "/readyz", "/v2/health/ready", "/v2/models/{id}/ready"})
"""Paths that answer 503 with their own body."""


def responses(path: str, error: Schema) -> Schema:
    """Return the ``responses`` of an operation; ``error`` is its error schema."""
    answer = {"content": _content(path)}
    responses_json = {
        "200": {"description": "Success", **answer},
        "4XX": {"description": "Rejected request", **error},
        "5XX": {"description": "Server error; retry later or report it", **error},
    }
    if path in _OWN_BODY_ON_503:
        responses_json["503"] = {"description": "Not ready or unhealthy", **answer}
    return responses_json


def _content(path: str) -> Schema:
    if path in _OTHER_KINDS:
        return {_OTHER_KINDS[path]: {"schema": {}}}
    schema: Schema = {"type": "object", "required": list(_FIELDS.get(path, ()))}
    if path == "/v1/completions/render":
        schema = {"type": "array", "items": {"type": "object", "required": list(_RENDERED)}}
    content: Schema = {JSON: {"schema": schema}}
    if path in _STREAMED:
        content[EVENTS] = {"schema": {"type": "object", "required": ["data"]}}
    return content
