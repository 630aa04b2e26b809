"""POST /v1/streams: continue a stream that another server began before it failed.

The proxy sends the original request, the seed, time and id from the relay header, its client's cursor, and the token
ids of every choice (`token_relay`). The response continues after the cursor. Its text is the same if both servers
have the same model.
"""

from __future__ import annotations

import msgspec

from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.api.anthropic.messages import messages
from quintet.frontend.api.inference.generate import generate
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat import chat_completions
from quintet.frontend.api.openai.completions import completions
from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.api.responses.create import responses
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.reattachment import PartialResponse
from quintet.frontend.service import Handler, Service
from quintet.wire.params import check_token_ids, shown

HANDLERS: dict[str, tuple[Handler, ErrorShape]] = {
    "/v1/completions": (completions, ERRORS),
    "/v1/chat/completions": (chat_completions, ERRORS),
    "/v1/messages": (messages, anthropic_errors.ERRORS),
    "/inference/v1/generate": (generate, ERRORS),
    "/v1/responses": (responses, ERRORS),
}
"""Endpoints of continuable streams by path, and their error format."""

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1


class ContinueStreamBody(msgspec.Struct):
    """Original request, and the response received so far."""

    path: str
    """Path of the original request."""
    request: msgspec.Raw
    """Body of the original request."""
    position: str
    """Part after the colon of the last event id; 0 for none."""
    outputs: list[list[int]]
    seeds: list[int]
    """One per prompt."""
    created: int
    name: str = ""
    """From the header X-Quintet-Relay, after the seeds and the time; "" without one."""


class _StreamFlags(msgspec.Struct):
    """Fields that decide whether a response can be continued."""

    stream: bool | None = None
    use_beam_search: bool | None = None


_decoder = msgspec.json.Decoder(ContinueStreamBody)
_flags_decoder = msgspec.json.Decoder(_StreamFlags)


async def continue_stream(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/streams."""
    body = parse.decode(await http_request.read_json_body(service.bodies), _decoder)
    if body.path not in HANDLERS:
        raise parse.invalid(
            f"path is {shown(body.path)}; streams of {', '.join(HANDLERS)} can be continued.", "path"
        )
    is_seed = all(MIN_SEED <= seed <= MAX_SEED for seed in body.seeds)
    if not is_seed or not 0 <= body.created <= MAX_SEED:
        raise parse.invalid("seeds and created must equal those of the header X-Quintet-Relay.", "seeds")
    flags = parse.decode(bytes(body.request), _flags_decoder)
    if not flags.stream:
        raise parse.invalid(
            "request has no `stream: true`, and only streams can be continued; send it again to its path.",
            "stream",
        )
    if flags.use_beam_search:
        raise parse.invalid(
            "request uses beam search, which cannot be continued; send it again to its path.",
            "use_beam_search",
        )
    for ids in body.outputs:
        check_token_ids(ids, service.config.model.vocab_size, "outputs")
    http_request.replace_body(
        bytes(body.request), PartialResponse(body.position, body.outputs, body.seeds, body.created, body.name)
    )
    handler, http_request.errors = HANDLERS[body.path]
    await handler(service, http_request)
