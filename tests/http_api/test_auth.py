"""API keys on every route, CORS, request ids, body limits."""

import asyncio
import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quintet.frontend.http.cors import with_cors
from quintet.frontend.routes import ROUTES
from quintet.wire.config import FrontendConfig

OPEN = {"/livez", "/readyz", "/health", "/ping", "/openapi.json", "/docs", "/docs/rapidoc-min.js"} | {
    "/v2/health/live",
    "/v2/health/ready",
}
GUARDED = [
    row.path.replace("{id:path}", "toy")
    for row in ROUTES
    if row.path not in OPEN and row.path != "/docs/{name}"
] + ["/", "/nowhere"]
COMPLETION = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def test_every_route_but_liveness_needs_a_key(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["first", "second"])
    for path in GUARDED:
        for method in ("GET", "POST"):
            for headers in ({}, {"authorization": "Bearer third"}, {"x-api-key": ""}):
                refused = server.ask(
                    method, path, headers={**headers, "endpoint-load-metrics-format": "JSON"}
                )
                assert "endpoint-load-metrics" not in refused.headers
                assert refused.status == 401, path
                kind = "authentication_error" if path.startswith("/v1/messages") else "AuthenticationError"
                assert refused.json["error"]["type"] == kind
                assert refused.headers["www-authenticate"] == "Bearer"
    for path in OPEN:
        assert server.ask("GET", path).status == 200
    for headers in (
        {"authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"x-api-key": "second"},
        {"api-key": "second"},
        {"authorization": "Bearer of-a-gateway", "x-api-key": "first"},
        {"authorization": "Bearer first", "x-api-key": "of-a-gateway"},
    ):
        assert server.ask("POST", "/v1/completions", COMPLETION, headers).status == 200
        assert server.ask("GET", "/nowhere", headers=headers).status == 404
    wrong = server.ask("GET", "/v1/models", headers={"authorization": "Basic first"})
    assert wrong.status == 401


def test_keys_are_not_shown(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["secret"])
    refused = server.ask("GET", "/v1/models", headers={"x-api-key": "hunter2"})
    assert b"secret" not in refused.body
    assert b"hunter2" not in refused.body


def test_only_allowed_origins_may_read_answers(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["k"], allowed_origins=["https://app.example"])
    key = {"x-api-key": "k"}
    mine = {"origin": "https://app.example"}
    allowed = server.ask("GET", "/v1/models", headers={**key, **mine})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" in server.ask("GET", "/v1/models", headers=mine).headers
    other = server.ask("GET", "/v1/models", headers={**key, "origin": "https://evil.example"})
    assert other.status == 200
    assert "access-control-allow-origin" not in other.headers
    exposed = allowed.headers["access-control-expose-headers"].lower()
    assert {"x-request-id", "x-stream-id", "retry-after"} <= set(exposed.replace(" ", "").split(","))


def test_preflight_allows_the_headers_of_clients(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["k"], allowed_origins=["https://app.example"])
    wanted = "authorization,content-type,last-event-id,x-stainless-os"
    asking = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    preflight = server.ask("OPTIONS", "/v1/completions", headers={**asking, "origin": "https://app.example"})
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-headers"] == wanted
    assert "POST" in preflight.headers["access-control-allow-methods"]
    private = {**asking, "origin": "https://app.example", "access-control-request-private-network": "true"}
    local = server.ask("OPTIONS", "/v1/completions", headers=private)
    assert local.status == 200 and local.headers["access-control-allow-private-network"] == "true"
    evil = server.ask("OPTIONS", "/v1/completions", headers={**asking, "origin": "https://evil.example"})
    assert evil.status == 400 and "access-control-allow-origin" not in evil.headers
    closed = serve(api_keys=["k"])
    refused = closed.ask("OPTIONS", "/v1/completions", headers={**asking, "origin": "https://app.example"})
    assert refused.status == 401 and "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("keys", "origins", "allowed"),
    [([], ["*"], False), ([], ["https://app.example"], True), (["k"], ["*"], True)],
)
def test_not_every_page_may_call_a_server_of_a_private_network_without_a_key(
    keys: list[str], origins: list[str], allowed: bool
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    headers = [(name.encode(), value.encode()) for name, value in preflight.items()]
    scope = {"type": "http", "method": "OPTIONS", "path": "/v1/completions", "headers": headers}
    app: Any = with_cors(cast(Any, None), FrontendConfig(api_keys=keys, allowed_origins=origins))
    asyncio.run(app(scope, None, send))
    answered = [name for name, _ in sent[0]["headers"]]
    assert (b"access-control-allow-private-network" in answered) is allowed


def test_request_ids_are_echoed_or_made(shared: Any) -> None:
    given = shared.ask("POST", "/v1/completions", COMPLETION, {"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json["id"] == "cmpl-mine-1"
    made = [shared.ask("GET", "/nowhere").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    odd = shared.ask("GET", "/livez", headers={"x-request-id": "a b"})
    assert odd.status == 200 and odd.headers["x-request-id"] != "a b"


@pytest.mark.parametrize("odd", ["a b", "r" * 257, "\xe4"])
def test_request_ids_that_cannot_be_echoed_are_refused(shared: Any, odd: str) -> None:
    replies = [
        shared.ask("POST", "/v1/completions", COMPLETION, {"x-request-id": odd}),
        shared.ask("POST", "/v1/completions", {"prompt": "x", "request_id": odd}),
    ]
    errors = [reply.json["error"] for reply in replies]
    assert [reply.status for reply in replies] == [400, 400]
    assert [error["param"] for error in errors] == [None, "request_id"]
    for error in errors:
        assert "1 to 256 printable ASCII characters" in error["message"]
    assert all(odd not in reply.headers["x-request-id"] for reply in replies)


def test_the_server_header_is_absent(shared: Any) -> None:
    assert "server" not in shared.ask("GET", "/livez").headers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused_and_the_next_request_works(serve: Callable[..., Any], chunked: bool) -> None:
    server = serve(max_body_bytes=10_000)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        body = json.dumps({"prompt": "x" * 200_000}).encode()
        pieces = (body[i : i + 4096] for i in range(0, len(body), 4096))
        connection.request("POST", "/v1/completions", pieces if chunked else body, encode_chunked=chunked)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status == 413
        assert "10000 bytes" in error["message"]
        connection.request("POST", "/v1/completions", COMPLETION)
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def test_a_disconnect_while_sending_a_body_does_not_affect_other_requests(shared: Any) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert shared.ask("POST", "/v1/completions", COMPLETION).status == 200


def test_a_request_that_is_not_http_is_a_400(shared: Any) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert shared.ask("GET", "/livez").status == 200


def test_root_path_with_a_proxy_that_strips_the_prefix(serve: Callable[..., Any]) -> None:
    server = serve(root_path="/llm", api_keys=["k"])
    assert server.ask("GET", "/livez").status == 200
    assert server.ask("GET", "/v1/models").status == 401
    assert server.ask("GET", "/v1/models", headers={"x-api-key": "k"}).status == 200
    assert server.ask("POST", "/v1/completions", COMPLETION, {"x-api-key": "k"}).status == 200


def test_root_path_with_a_proxy_that_keeps_the_prefix(serve: Callable[..., Any]) -> None:
    server = serve(root_path="/llm", api_keys=["k"])
    key = {"x-api-key": "k"}
    assert server.ask("GET", "/llm/livez").status == 200
    assert server.ask("GET", "/llm/v1/models").status == 401
    assert server.ask("GET", "/llm/v1/models/toy", headers=key).status == 200
    assert server.ask("POST", "/llm/v1/completions", COMPLETION, key).status == 200
    assert server.ask("GET", "/llm/llm/livez", headers=key).status == 404
    assert server.ask("GET", "/llmx/livez", headers=key).status == 404
    assert server.ask("GET", "/llm/openapi.json", headers=key).json["servers"] == [{"url": "/llm"}]


def test_cors_methods_and_headers_can_be_restricted(serve: Callable[..., Any]) -> None:
    server = serve(
        allowed_origins=["https://app.example"],
        allowed_methods=["GET"],
        allowed_headers=["authorization"],
        allow_credentials=True,
    )
    mine = {"origin": "https://app.example", "access-control-request-headers": "authorization"}
    get = server.ask("OPTIONS", "/v1/models", headers={**mine, "access-control-request-method": "GET"})
    assert get.status == 200 and get.headers["access-control-allow-credentials"] == "true"
    assert get.headers["access-control-allow-methods"] == "GET"
    post = server.ask("OPTIONS", "/v1/models", headers={**mine, "access-control-request-method": "POST"})
    assert post.status == 400
    odd = {**mine, "access-control-request-headers": "x-odd", "access-control-request-method": "GET"}
    assert server.ask("OPTIONS", "/v1/models", headers=odd).status == 400


def test_paths_may_lack_v1_repeat_it_or_have_azures_prefixes(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["k"], root_path="/llm")
    key = {"x-api-key": "k"}
    for prefix in (
        "/openai/v1",
        "/openai/deployments/an/odd/toy",
        "/openai/v1/deployments/toy",
        "/v1/v1",
        "",
    ):
        path = f"{prefix}/completions?api-version=2024-10-21"
        assert server.ask("POST", path, COMPLETION).status == 401
        assert server.ask("POST", path, COMPLETION, key).status == 200
    assert server.ask("GET", "/models", headers=key).status == 200
    assert server.ask("GET", "/llm/openai/v1/models/toy", headers=key).status == 200
    assert server.ask("GET", "/openai/livez", headers=key).status == 404


def test_tokenizer_info_needs_its_flag(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Odd", "chat_template": "old"}')
    assert serve().ask("GET", "/tokenizer_info").status == 404
    server = serve(tokenizer_info=True)
    model = msgspec.structs.replace(server.config.model, tokenizer_path=str(tmp_path))
    server.service.config = msgspec.structs.replace(server.config, model=model)
    tokenizer_info = server.ask("GET", "/tokenizer_info").json
    assert tokenizer_info == {"tokenizer_class": "Odd", "chat_template": "{{ messages }}"}


def test_https(serve: Callable[..., Any], tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", *words.split(), *name, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server = serve(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    trust = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=trust)
    for stream in (False, True):
        body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and b" t2" in answer.read()
    connection.close()
    with pytest.raises(OSError):
        server.ask("GET", "/livez")
