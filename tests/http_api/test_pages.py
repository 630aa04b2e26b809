"""/metrics, /openapi.json, /docs and health pages."""

import gc
import logging
import logging.handlers
import queue
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.routes import ROUTES
from quintet.wire.supervision import SlotState


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_cover_all_processes(serve: Callable[..., Any]) -> None:
    server = serve()
    server.ask("POST", "/v1/completions", {"prompt": "x y", "max_tokens": 3, "stream": True})
    server.ask("GET", "/made-up-path")
    reply = server.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(reply.body.decode())

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"model_name": "toy", **labels}.items())]

    alias = {"engine": "0"}
    running = [value("vllm:num_requests_running", engine=engine) for engine in "01"]
    assert running == [2, 3]
    assert [value("vllm:generation_tokens_total", engine=engine) for engine in "01"] == [100, 150]
    assert value("quintet:generation_tokens_total", role="core", index="1") == 150
    assert value("quintet:stop_string_hits_total", role="detokenizer", index="3") == 7
    assert value("vllm:request_queue_time_seconds_bucket", le="0.1", **alias) == 1
    assert value("vllm:request_queue_time_seconds_bucket", le="+Inf", engine="1") == 1
    assert value("vllm:request_success_total", finished_reason="length", **alias) == 1
    assert value("vllm:time_to_first_token_seconds_count", **alias) == 1
    assert value("vllm:inter_token_latency_seconds_count", **alias) == 2
    assert value("vllm:request_prompt_tokens_sum", **alias) == 2
    assert value("vllm:request_generation_tokens_sum", **alias) == 3
    assert value("vllm:e2e_request_latency_seconds_count", **alias) == 1
    assert value("quintet:num_requests_running", role="core", index="1") == 3
    assert value("quintet:process_cpu_seconds_total", role="core", index="0") == 2.0
    assert value("quintet:process_restarts_total", role="core", index="1") == 3
    me = {"role": "frontend", "index": "0"}
    assert value("quintet:hop_seconds_count", hop="detokenizer_frontend", **me) == 3
    assert value("quintet:stream_write_seconds_count", **me) == 3
    assert value("quintet:http_requests_total", route="other", method="GET", status="404", **me) == 1
    routes = {dict(labels)["route"] for name, labels in found if name == "quintet:http_requests_total"}
    assert "/made-up-path" not in routes


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_explain_header_returns_the_routing_of_a_request(
    serve: Callable[..., Any], is_streamed: bool
) -> None:
    server, body = serve(), {"prompt": "x y", "max_tokens": 3, "stream": is_streamed}
    reply = server.ask("POST", "/v1/completions", body, {"X-Quintet-Explain": "1"})
    assert reply.headers["x-quintet-routing"] == "engine 0: only engine"
    assert "x-quintet-routing" not in server.ask("POST", "/v1/completions", body).headers


def test_metrics_without_a_supervisor_answer_are_a_503(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.frontend.metrics.MAX_WAIT_S", 0.05)
    server = serve()
    server.engine.is_supervisor_silent = True
    reply = server.ask("GET", "/metrics")
    assert reply.status == 503
    assert "supervisor process did not answer within 0.05 s" in reply.json["error"]["message"]


DOCKERFILE = Path(__file__).parents[2] / "deploy/integrations/docker/Dockerfile"
RECOVERING = {"executor": SlotState.STARTING, "core": SlotState.STALLED}


def test_a_recovering_container_is_healthy(serve: Callable[..., Any]) -> None:
    server = serve(RECOVERING)
    dockerfile = DOCKERFILE.read_text()
    check = dockerfile[dockerfile.index("HEALTHCHECK") :].partition("ENTRYPOINT")[0]
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", check)
    assert server.ask("GET", "/health").status == 503
    assert server.ask("GET", path).status == 200


def test_the_openapi_document_has_every_route(shared: Any) -> None:
    document = shared.ask("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    for row in ROUTES:
        for method in row.methods:
            assert (row.path.replace(":path", ""), method.lower()) in described
    schemas = document["components"]["schemas"]
    used = set(
        re.findall(r'"#/components/schemas/([^"]+)"', shared.ask("GET", "/openapi.json").body.decode())
    )
    assert used <= set(schemas)
    temperature = schemas["CompletionBody"]["properties"]["temperature"]
    assert (temperature["minimum"], temperature["maximum"], temperature["default"]) == (0, 2, 1.0)
    assert schemas["ChatBody"]["properties"]["messages"]["items"]["$ref"].endswith("ChatMessage")


def test_the_docs_page_loads_no_external_files(shared: Any) -> None:
    page = shared.ask("GET", "/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="((?!data:)[^"]*)', page.body.decode())
    assert parts == ["docs/rapidoc-min.js"]
    script = shared.ask("GET", f"/{parts[0]}")
    assert script.status == 200 and len(script.body) > 100
    assert b"sourceMappingURL" not in script.body
    assert b'spec-url="openapi.json"' in page.body and b'load-fonts="false"' in page.body
    assert shared.ask("GET", "/docs/index.html").status == 404


def test_the_documentation_can_be_disabled(serve: Callable[..., Any]) -> None:
    server = serve(docs=False)
    for path in ("/docs", "/docs/rapidoc-min.js", "/openapi.json"):
        assert server.ask("GET", path).status == 404


def test_status_pages(shared: Any) -> None:
    assert shared.ask("GET", "/livez").body == b"ok"
    assert shared.ask("GET", "/ping").status == 200
    assert shared.ask("POST", "/ping").status == 200
    assert shared.ask("GET", "/v2/health/live").json == {"live": True}
    assert shared.ask("GET", "/v2/health/ready").json["ready"] is True
    assert shared.ask("GET", "/v2/models/toy/ready").json == {"name": "toy", "ready": True}
    assert shared.ask("GET", "/v2/models/other/ready").status == 404
    assert re.fullmatch(r"\d+\..*", shared.ask("GET", "/version").json["version"])
    assert shared.ask("GET", "/load").json == {"server_load": 0}
    head = shared.ask("HEAD", "/health")
    assert (head.status, head.body) == (200, b"")


def test_a_request_is_one_log_line(serve: Callable[..., Any]) -> None:
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    log, handler = logging.getLogger("quintet"), logging.handlers.QueueHandler(lines)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        serve(log_requests=True).ask("GET", "/made-up%0A2026-01-01%20INFO%20forged")
        line = lines.get(timeout=10).getMessage()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert "\n" not in line and line.endswith("GET /made-up%0A2026-01-01%20INFO%20forged 404")


def test_bodies_are_freed_with_their_request(serve: Callable[..., Any]) -> None:
    """A request and its ASGI scope are a reference cycle: freeing megabytes must not depend on the cycle collector."""
    server = serve()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            server.ask("POST", "/v1/completions", {"prompt": "x" * 5000, "max_tokens": 1})
        server.ask("GET", "/health")
        bodies = [each._body for each in gc.get_objects() if isinstance(each, HttpRequest)]
    finally:
        gc.enable()
    assert not [body for body in bodies if body and len(body) > 5000]
