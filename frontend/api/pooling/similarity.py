"""POST /score and /rerank: similarities of texts, the cosines of the angles between their vectors."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.pooling.types import RerankBody, ScoreBody, Texts
from quintet.frontend.api.pooling.vectors import fields_of, pool, pooling_of, vector_of
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.errors import invalid
from quintet.wire.messages import TextPrompt
from quintet.wire.params import shown
from quintet.wire.request import name_in_responses

_score_decoder, _rerank_decoder = msgspec.json.Decoder(ScoreBody), msgspec.json.Decoder(RerankBody)
FIRST, SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
"""Names of the two sides; one of each is sent."""


async def score(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /score: one text and several, or as many on both sides."""
    body = await parse.read_body(service, http_request, _score_decoder)
    pooling_of(service.config.model)
    (first_name, first), (second_name, second) = _side(body, FIRST), _side(body, SECOND)
    if len(first) != len(second) and len(first) != 1:
        raise invalid(
            f"{first_name} has {len(first)} texts, and {second_name} has {len(second)}; send one text as {first_name}, or as"
            " many as the other.",
            first_name,
        )
    special = body.add_special_tokens is not False
    prompts = [TextPrompt(text, special) for text in (*first, *second)]
    found = await pool(service, http_request, body, prompts, second_name)
    units = [vector_of(hidden, normalize=True) for hidden in found.hidden]
    queries = units[: len(first)] * (len(second) if len(first) == 1 else 1)
    scores = [_cosine(*pair) for pair in zip(queries, units[len(first) :], strict=True)]
    await http_request.respond_json(
        {
            "id": f"score-{parse.request_id(fields_of(body), http_request)}",
            "object": "list",
            "created": int(time.time()),
            "model": name_in_responses(service.config.model, body.model),
            "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
            "usage": found.usage,
        }
    )


async def rerank(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /rerank: documents in the order of their similarity to a query."""
    body = await parse.read_body(service, http_request, _rerank_decoder)
    pooling_of(service.config.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    if not texts:
        raise invalid("documents is []; it must hold at least one text.", "documents")
    if body.top_n is not None and body.top_n < 0:
        raise invalid(f"top_n is {shown(body.top_n)}; it must be at least 1, or 0 for all.", "top_n")
    special = body.add_special_tokens is not False
    prompts = [TextPrompt(text, special) for text in (body.query, *texts)]
    found = await pool(service, http_request, body, prompts, "documents")
    query, *units = (vector_of(hidden, normalize=True) for hidden in found.hidden)
    scores = [_cosine(query, unit) for unit in units]
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    has_texts = body.return_documents is not False
    results: list[dict[str, object]] = []
    for index in order[: body.top_n or None]:
        document = {"document": {"text": texts[index]}} if has_texts else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    await http_request.respond_json(
        {
            "id": f"rerank-{parse.request_id(fields_of(body), http_request)}",
            "model": name_in_responses(service.config.model, body.model),
            "usage": found.usage,
            "results": results,
        }
    )


def _side(body: ScoreBody, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return one side of the pairs, with the name under which it was sent."""
    given: list[tuple[str, Texts]] = [
        (name, getattr(body, name)) for name in names if getattr(body, name) is not None
    ]
    if len(given) != 1 or given[0][1] == []:
        sent = ", ".join(name for name, _ in given) or "none of them"
        raise invalid(
            f"One of {', '.join(names)} must be sent, with at least one text; {sent} was sent.", names[0]
        )
    name, texts = given[0]
    return name, [texts] if isinstance(texts, str) else texts


def _cosine(first: array[float], second: array[float]) -> float:
    """Return the product of two vectors of length 1."""
    return sum(a * b for a, b in zip(first, second, strict=True))
