"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat_body import parse_conversation
from quintet.frontend.api.openai.prompts import parse_prompts
from quintet.frontend.api.openai.types import TokenizeBody
from quintet.frontend.api.pooling.types import EmbeddingBody
from quintet.frontend.api.pooling.vectors import Vectors, fields_of, pool, pooling_of, vector_of
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import Prompt
from quintet.wire.params import shown
from quintet.wire.pooling import PoolingConfig
from quintet.wire.request import name_in_responses

FORMATS = ("float", "base64")
TOGETHER = 16
"""Vectors that are converted before other clients are served."""
_decoder = msgspec.json.Decoder(EmbeddingBody)


async def embeddings(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    pooling = pooling_of(config.model)
    _check(body, pooling)
    field = "input" if body.messages is None else "messages"
    prompts: Sequence[Prompt] = (
        parse_prompts(body.input, field, body, config.model, max_tokens=0)
        if body.messages is None
        else [_conversation(body, config)]
    )
    found = await pool(service, http_request, body, prompts, field)
    response = {
        "id": f"embd-{parse.request_id(fields_of(body), http_request)}",
        "object": "list",
        "created": int(time.time()),
        "model": name_in_responses(config.model, body.model),
        "data": await _data(found, body, pooling),
        "usage": found.usage,
    }
    await http_request.respond_json(response)


async def _data(found: Vectors, body: EmbeddingBody, pooling: PoolingConfig) -> list[dict[str, object]]:
    normalize = pooling.normalize
    for asked in (body.normalize, body.use_activation):
        normalize = normalize if asked is None else asked
    data: list[dict[str, object]] = []
    for index, hidden in enumerate(found.hidden):
        if index % TOGETHER == 0:
            await asyncio.sleep(0)  # other clients are served
        vector = vector_of(hidden, normalize=normalize, dimensions=body.dimensions)
        if body.encoding_format == "base64" and sys.byteorder == "big":
            vector.byteswap()
        shape = (
            base64.b64encode(vector.tobytes()).decode()
            if body.encoding_format == "base64"
            else vector.tolist()
        )
        data.append({"object": "embedding", "index": index, "embedding": shape})
    return data


def _check(body: EmbeddingBody, pooling: PoolingConfig) -> None:
    """Raise `RequestError` for values that are not supported."""
    if body.encoding_format is not None and body.encoding_format not in FORMATS:
        raise invalid(
            f"encoding_format is {shown(body.encoding_format)}; it must be 'float' or 'base64'.",
            "encoding_format",
        )
    if body.dimensions is not None and not 1 <= body.dimensions <= pooling.width:
        raise invalid(
            f"dimensions is {shown(body.dimensions)}; it must be between 1 and {pooling.width}, the width of this model's"
            " vectors.",
            "dimensions",
        )
    if body.embed_dtype not in (None, "float32"):
        raise parse.not_implemented(
            "embed_dtype", f"`{shown(body.embed_dtype)}`", "Leave it out: vectors are float32."
        )
    if body.endianness not in (None, "native", "little"):
        raise parse.not_implemented("endianness", f"`{shown(body.endianness)}`", "Leave it out.")
    if body.messages is not None and body.input is not None:
        raise invalid("input and messages were both sent; send one of them.", "input")


def _conversation(body: EmbeddingBody, config: EngineConfig) -> Prompt:
    """Return the prompt of ``messages``. By default it does not ask for an answer."""
    fields = TokenizeBody(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    return parse_conversation(fields, config).prompt
