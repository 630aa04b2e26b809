"""POST /invocations: SageMaker's single path; forwards to chat or completions by the body's fields."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat import chat_completions
from quintet.frontend.api.openai.completions import completions
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.errors import invalid


class _Kind(msgspec.Struct):
    """Fields that determine the request type."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Kind)


async def invocations(service: Service, http_request: HttpRequest) -> None:
    """Forward to chat completions (``messages``) or completions (``prompt``)."""
    kind = parse.decode(await http_request.read_json_body(service.bodies), _decoder)
    if kind.messages is not msgspec.UNSET:
        await chat_completions(service, http_request)
    elif kind.prompt is not msgspec.UNSET:
        await completions(service, http_request)
    else:
        raise invalid(
            "messages and prompt are both missing; send one of them.",
            "messages",
        )
