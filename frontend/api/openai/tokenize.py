"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat_body import parse_conversation
from quintet.frontend.api.openai.types import DetokenizeBody, TokenizeBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.codec import ID_BYTES, unpack_i32
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.messages import ChatPrompt, TextPrompt
from quintet.wire.params import check_token_ids

PART_IDS = 1 << 16
"""Ids per JSON part."""

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /tokenize: return the ids of a text, or of a conversation rendered by the chat template."""
    config = service.config
    body = await parse.read_body(service, http_request, _tokenize_decoder)
    prompt: TextPrompt | ChatPrompt
    if body.prompt is not None:
        prompt = TextPrompt(body.prompt, body.add_special_tokens is not False)
    elif body.messages is not None:
        prompt = parse_conversation(body, config).prompt
    else:
        raise invalid("prompt and messages are both missing; send one of them.", "prompt")
    answer = await service.queries.tokenize(prompt, bool(body.return_token_strs))
    await http_request.respond_json(
        {
            "count": len(answer.token_ids) // ID_BYTES,
            "max_model_len": config.model.max_model_len,
            "tokens": await _as_json(answer.token_ids),
            "token_strs": answer.token_strs,
        }
    )


async def _as_json(column: bytes) -> msgspec.Raw:
    """Return ids as a JSON list, encoded in parts: a Python list of millions of ints would take ten times the memory.

    Twenty million ids take more than a second; other requests' events are written between the parts.
    """
    ids, parts = unpack_i32(column), list[bytes]()
    for at in range(0, len(ids), PART_IDS):
        parts.append(msgspec.json.encode(list(ids[at : at + PART_IDS]))[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


async def tokenizer_info(service: Service, http_request: HttpRequest) -> None:
    """Handle GET /tokenizer_info: return the tokenizer's configuration and chat template."""
    config = service.config
    if not config.frontend.tokenizer_info:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "The tokenizer's configuration is not public; start the server with --enable-tokenizer-info-endpoint.",
        )
    path = Path(config.model.tokenizer_path) / "tokenizer_config.json"
    config_json: dict[str, object] = (
        msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    )
    template = config.model.chat_templates.get("default")
    await http_request.respond_json(
        config_json if template is None else {**config_json, "chat_template": template}
    )


async def detokenize(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /detokenize: return the text of token ids."""
    config = service.config
    body = await parse.read_body(service, http_request, _detokenize_decoder)
    check_token_ids(body.tokens, config.model.vocab_size, "tokens")
    await http_request.respond_json({"prompt": await service.queries.detokenize(body.tokens)})
