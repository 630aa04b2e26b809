"""Server settings, fields and headers of vLLM's clients that are not part of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.frontend.http.server import wrap_middleware
from quintet.frontend.metrics import LoadReport
from quintet.wire.codec import unpack_i32
from quintet.wire.config import SpeculativeConfig
from quintet.wire.errors import ConfigError
from quintet.wire.messages import Submit, TokenPrompt
from quintet.wire.metrics import Metrics
from quintet.wire.step import DraftCounts
from quintet.wire.supervision import MetricsReport

C, H = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    C: {"prompt": "x", "max_tokens": 2},
    H: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", [C, H])
def test_force_include_usage_ends_every_stream_with_usage(serve: Callable[..., Any], path: str) -> None:
    server = serve(force_include_usage=True)
    for options in (None, {"include_usage": False}):
        events = server.ask("POST", path, {**BODIES[path], "stream": True, "stream_options": options}).events
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
        assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("path", [C, H])
def test_tokens_as_ids_applies_to_every_request(serve: Callable[..., Any], path: str) -> None:
    server = serve(tokens_as_ids=True)

    def tokens(value: bool | None) -> list[str]:
        body = {**BODIES[path], "logprobs": 1 if path == C else True, "return_tokens_as_token_ids": value}
        found = server.ask("POST", path, body).json["choices"][0]["logprobs"]
        return found["tokens"] if path == C else [each["token"] for each in found["content"]]

    assert tokens(None) == tokens(True) == ["token_id:10", "token_id:11"]
    assert tokens(False) == [" t0", " t1"]


def test_chat_template_kwargs_have_defaults(serve: Callable[..., Any]) -> None:
    server = serve(chat_template_kwargs={"enable_thinking": False, "tone": "dry"})
    for value, used in (
        (None, {"enable_thinking": False, "tone": "dry"}),
        ({"tone": "kind"}, {"enable_thinking": False, "tone": "kind"}),
        ({"thinking": True}, {"thinking": True, "tone": "dry"}),
    ):
        assert server.ask("POST", H, {**BODIES[H], "chat_template_kwargs": value}).status == 200
        prompt = server.engine.wait_for(Submit)[-1].prompt
        assert json.loads(prompt.template_kwargs) == used


def test_vllm_xargs_are_accepted(shared: Any) -> None:
    for path, body in BODIES.items():
        extra = {"vllm_xargs": {"a": 1, "b": "c", "d": 0.5, "e": [1, 2], "f": True}}
        assert shared.ask("POST", path, {**body, **extra}).status == 200


# --- prompts in ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_may_be_sent_as_token_ids(serve: Callable[..., Any], stream: bool) -> None:
    server = serve()
    body = {**BODIES[H], "prompt_token_ids": [5, 6, 7], "return_token_ids": True, "stream": stream}
    answer = server.ask("POST", H, body)
    [submit] = server.engine.wait_for(Submit)
    assert isinstance(submit.prompt, TokenPrompt)
    assert list(unpack_i32(submit.prompt.token_ids)) == [5, 6, 7]
    reply = answer.events[0] if stream else answer.json
    assert reply["object"].startswith("chat.completion") and reply["prompt_token_ids"] == [5, 6, 7]


def test_token_ids_of_a_conversation_are_rendered_unchanged(shared: Any) -> None:
    rendered = shared.ask("POST", f"{H}/render", {**BODIES[H], "prompt_token_ids": [5, 6]})
    assert rendered.json["token_ids"] == [5, 6]


def test_a_batch_refuses_token_ids(shared: Any) -> None:
    body = {"messages": [[{"role": "user", "content": "x"}]], "prompt_token_ids": [5]}
    refused = shared.ask("POST", f"{H}/batch", body)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt_token_ids")


def test_the_role_chunk_has_no_token_ids(shared: Any) -> None:
    for value in (None, True):
        first, *rest = shared.ask("POST", H, {**BODIES[H], "stream": True, "return_token_ids": value}).events
        assert "token_ids" not in first["choices"][0]
        ids = [event["choices"][0]["token_ids"] for event in rest]
        assert ids == ([[10], [11]] if value else [None, None])


# --- load in headers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["TEXT", "json"])
@pytest.mark.parametrize("stream", [False, True])
def test_load_is_reported_on_request(shared: Any, value: str, stream: bool) -> None:
    headers = {"endpoint-load-metrics-format": value}
    metrics = shared.ask("POST", H, {**BODIES[H], "stream": stream}, headers).headers["endpoint-load-metrics"]
    if value == "TEXT":
        assert metrics == "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
    else:
        kind, _, report = metrics.partition(" ")
        assert (kind, json.loads(report)["named_metrics"]["num_requests_waiting"]) == ("JSON", 0.0)


def test_load_is_not_reported_by_default_or_in_unknown_formats(shared: Any) -> None:
    for headers in ({}, {"endpoint-load-metrics-format": "BIN"}):
        assert "endpoint-load-metrics" not in shared.ask("POST", H, BODIES[H], headers).headers


def test_an_answer_does_not_wait_for_missing_load_metrics(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.is_supervisor_silent = True
    answer = server.ask("POST", H, BODIES[H], {"endpoint-load-metrics-format": "TEXT"})
    assert answer.status == 200 and "endpoint-load-metrics" not in answer.headers


def test_parallel_answers_share_one_read_of_the_load() -> None:
    async def scenario() -> None:
        read = asyncio.Event()
        reads: list[float] = []

        async def metrics(timeout_s: float, own: bytes) -> MetricsReport:
            reads.append(timeout_s)
            await read.wait()
            return MetricsReport(1, [])

        service: Any = SimpleNamespace(queries=SimpleNamespace(metrics=metrics), metrics=Metrics())
        report = LoadReport(service)
        answers = [asyncio.ensure_future(report.headers("TEXT")) for _ in range(5)]
        await asyncio.sleep(0)
        answers.pop().cancel()
        await asyncio.sleep(0)
        read.set()
        assert len({name for ((name, _),) in await asyncio.gather(*answers)}) == 1
        assert len(reads) == 1

    asyncio.run(scenario())


# --- middleware -------------------------------------------------------------------------------------------------------


class Refusing:
    """Middleware that answers one path and passes other requests on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = Response("closed", 403) if scope["path"] == "/closed" else self.app
        await app(scope, receive, send)


async def marking(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers["x-marked"] = request.method
    return response


NOT_CALLABLE = 5


def test_middleware_wraps_the_application(serve: Callable[..., Any]) -> None:
    server = serve(middleware=[f"{__name__}.Refusing", f"{__name__}.marking"])
    closed = server.ask("POST", "/closed", {})
    assert (closed.status, closed.headers["x-marked"]) == (403, "POST")
    answer = server.ask("POST", H, {**BODIES[H], "stream": True})
    assert answer.headers["x-marked"] == "POST" and answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["nowhere.Thing", "json.Nothing", "plain", f"{__name__}.NOT_CALLABLE"])
def test_invalid_middleware_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        wrap_middleware(Refusing, [name])  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [C, H])
def test_responses_report_their_draft_tokens_if_configured(serve: Callable[..., Any], path: str) -> None:
    server = serve(reports_drafts=True, speculative=SpeculativeConfig(num_speculative_tokens=3))
    server.engine.drafts = DraftCounts(9, [1, 1, 2])
    reported = {
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 5 / 9,
        "acceptance_histogram": [1, 1, 2, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }
    assert server.ask("POST", path, BODIES[path]).json["metrics"] == {"speculative_decoding": reported}
    streamed = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    assert server.ask("POST", path, streamed).events[-1]["metrics"] == {"speculative_decoding": reported}
    two = {**BODIES[path], "n": 2, "temperature": 1}
    assert server.ask("POST", path, two).json["metrics"] == {"speculative_decoding": None}
    server.engine.drafts = None
    assert server.ask("POST", path, BODIES[path]).json["metrics"] == {"speculative_decoding": None}


def test_responses_have_no_metrics_by_default(shared: Any) -> None:
    assert "metrics" not in shared.ask("POST", H, BODIES[H]).json
