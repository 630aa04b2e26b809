"""POST /v1/streams: go on here with a stream that began at another server, which is lost.

Whoever passed the stream on sends the request as it came, the seed, time and name that the response told, where its client is,
and the tokens of every choice (`relay.py`). The answer goes on behind that as if nothing had happened, with the same text if the
other server had the same model: tokens are what it is made of.
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
from quintet.frontend.resume.partial_response import PartialResponse
from quintet.frontend.service import Handler, Service
from quintet.wire.params import check_token_ids, shown

HANDLERS: dict[str, tuple[Handler, ErrorShape]] = {
    "/v1/completions": (completions, ERRORS),
    "/v1/chat/completions": (chat_completions, ERRORS),
    "/v1/messages": (messages, anthropic_errors.ERRORS),
    "/inference/v1/generate": (generate, ERRORS),
    "/v1/responses": (responses, ERRORS),
}
"""The requests whose streams can go on elsewhere, by path, and how their clients are told of errors."""

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1


class ContinueStreamBody(msgspec.Struct):
    """A request, and what was told of its answer."""

    path: str
    """Where the request was sent."""
    request: msgspec.Raw
    """Its body."""
    position: str
    """What followed the colon in the id of the last event; 0 for none."""
    outputs: list[list[int]]
    seeds: list[int]
    """Of each prompt."""
    created: int
    name: str = ""
    """As the header X-Quintet-Relay had it behind them; empty where it had none."""


class _Going(msgspec.Struct):
    """What of a request says whether its answer can go on."""

    stream: bool | None = None
    use_beam_search: bool | None = None


_decoder = msgspec.json.Decoder(ContinueStreamBody)
_going_decoder = msgspec.json.Decoder(_Going)


async def go_on(service: Service, exchange: HttpRequest) -> None:
    """Answer one request."""
    body = parse.decode(await exchange.read_json_body(service.bodies), _decoder)
    if body.path not in HANDLERS:
        raise parse.invalid(
            f"path is {shown(body.path)}; streams of {', '.join(HANDLERS)} can go on.", "path"
        )
    is_seed = all(MIN_SEED <= seed <= MAX_SEED for seed in body.seeds)
    if not is_seed or not 0 <= body.created <= MAX_SEED:
        raise parse.invalid("seeds and created must be as the header X-Quintet-Relay had them.", "seeds")
    going = parse.decode(bytes(body.request), _going_decoder)
    if not going.stream:
        raise parse.invalid(
            "request is not for a stream, and only streams go on: send it again to its path.", "stream"
        )
    if going.use_beam_search:
        raise parse.invalid(
            "request asks for beam search, whose answer is found anew: send it again to its path.",
            "use_beam_search",
        )
    for ids in body.outputs:
        check_token_ids(ids, service.config.model.vocab_size, "outputs")
    exchange.take_over(
        bytes(body.request), PartialResponse(body.position, body.outputs, body.seeds, body.created, body.name)
    )
    handler, exchange.errors = HANDLERS[body.path]
    await handler(service, exchange)
