"""HTTP variants of clients: upgrade offers, compressed bodies, other charsets, extra slashes, HTTP/1.0."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.http.paths import tidy_path
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.request import check_length

C = "/v1/completions"
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
TEXT = " t0 t1"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


def head(*lines: bytes, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> bytes:
    first = b"POST %b HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n" % (path, version)
    return first + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def sized(body: bytes = BODY) -> bytes:
    return b"content-length: %d" % len(body)


def chunked(body: bytes = BODY) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def send_raw(server: Any, *pieces: bytes) -> bytes:
    """Send pieces over one connection and return all that is received. The last piece asks for a close."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        received = b""
        while piece := client.recv(1 << 16):
            received += piece
        return received


# --- offers to upgrade ------------------------------------------------------------------------------------------------

OFFER = H2C.removesuffix(b"\r\n")
CLOSING = head(b"connection: close", sized()) + BODY


@pytest.mark.parametrize(
    "request_",
    [head(OFFER, sized()) + BODY, head(OFFER, b"transfer-encoding: chunked") + chunked()],
    ids=["with a length", "chunked"],
)
def test_an_http2_upgrade_offer_is_ignored_and_the_body_is_read(shared: Any, request_: bytes) -> None:
    for size in (len(request_), 7):
        pieces = [request_[at : at + size] for at in range(0, len(request_), size)]
        received = send_raw(shared, *pieces, CLOSING)
        assert received.count(b"HTTP/1.1 200") == 2 and received.count(b'" t0 t1"') == 2


def test_requests_with_upgrade_offers_can_be_pipelined(shared: Any) -> None:
    one = head(OFFER, sized()) + BODY
    received = send_raw(shared, one * 3 + CLOSING)
    assert received.count(b"HTTP/1.1 200") == 4 and received.count(b'" t0 t1"') == 4


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, HTTP/2.0"])
def test_an_upgrade_offer_without_a_body_is_answered(shared: Any, offer: bytes) -> None:
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: %b\r\n\r\n" % offer
    assert send_raw(shared, get).startswith(b"HTTP/1.1 200")


def test_request_smuggling_with_an_upgrade_offer_is_refused(shared: Any) -> None:
    twice = head(OFFER, sized(), b"transfer-encoding: chunked") + chunked()
    assert send_raw(shared, twice).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"supports only HTTP/1.1"),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"Not an HTTP/1.1 request"),
        (head(b"transfer-encoding: chunked") + b"zz\r\n", b"Not an HTTP/1.1 request"),
    ],
)
def test_unreadable_requests_have_an_error_message(shared: Any, sent: bytes, words: bytes) -> None:
    received = send_raw(shared, sent)
    assert received.startswith(b"HTTP/1.1 400") and words in received
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "400"


# --- HTTP/1.0 ---------------------------------------------------------------------------------------------------------


def test_a_stream_over_http_1_0_ends_with_its_connection(shared: Any) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    headers, _, stream = send_raw(shared, head(sized(body), version=b"1.0") + body).partition(b"\r\n\r\n")
    assert b"200" in headers and b"transfer-encoding" not in headers and b"connection: close" in headers
    assert stream.startswith(b"id: ") and stream.endswith(b"data: [DONE]\n\n")


def test_an_answer_over_http_1_0_has_a_content_length(shared: Any) -> None:
    headers, _, body = send_raw(
        shared, head(sized(), b"expect: 100-continue", version=b"1.0") + BODY
    ).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200") and b"content-length: %d" % len(body) in headers
    assert json.loads(body)["choices"][0]["text"] == TEXT


# --- bodies -----------------------------------------------------------------------------------------------------------


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)  # test ids must be the same in every process


def deflated(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(body) + stream.flush()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzipped(BODY)),
        ("x-gzip", gzipped(BODY)),
        ("GZIP, identity", gzipped(BODY)),
        ("gzip", gzipped(BODY[:9]) + gzipped(BODY[9:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", deflated(BODY)),
        ("identity", BODY),
        ("", BODY),
        ("gzip", gzipped(b"\xef\xbb\xbf" + BODY)),
    ],
    ids=["gzip", "x-gzip", "list", "members", "zlib", "deflate", "identity", "empty", "mark"],
)
def test_compressed_bodies_are_read(shared: Any, coding: str, body: bytes) -> None:
    answer = shared.ask("POST", C, body, {"content-encoding": coding})
    assert answer.status == 200 and answer.json["choices"][0]["text"] == TEXT


def test_a_compressed_body_may_be_chunked(shared: Any) -> None:
    packed = gzipped(BODY)
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in packed) + b"0\r\n\r\n"
    closing = head(b"content-encoding: gzip", b"transfer-encoding: chunked", b"connection: close")
    assert b'" t0 t1"' in send_raw(shared, closing, pieces)


@pytest.mark.parametrize(
    ("coding", "body", "words"),
    [
        ("gzip", BODY, "incorrect header check"),
        ("gzip", gzipped(BODY)[:-9], "its end is missing"),
        ("gzip", gzipped(BODY) + b"rest", "incorrect header check"),
        ("deflate", zlib.compress(BODY) + b"rest", "bytes after its end"),
    ],
    ids=["not compressed", "cut off", "trailing bytes, gzip", "trailing bytes, deflate"],
)
def test_broken_compression_is_refused(shared: Any, coding: str, body: bytes, words: str) -> None:
    refused = shared.ask("POST", C, body, {"content-encoding": coding})
    assert refused.status == 400 and words in refused.json["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
def test_unsupported_encodings_are_refused_with_the_supported_ones(shared: Any, coding: str) -> None:
    refused = shared.ask("POST", C, BODY, {"content-encoding": coding})
    assert (refused.status, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert coding in refused.json["error"]["message"]


def test_the_decompressed_size_is_bounded(serve: Callable[..., Any]) -> None:
    server = serve(max_body_bytes=10_000)
    bomb = gzipped(b" " * 50_000_000)
    members = gzipped(b"") * 1000  # 20 000 bytes of empty members
    stretched = head(
        b"content-encoding: gzip", b"transfer-encoding: chunked", b"connection: close"
    ) + chunked(members)
    refused = server.ask("POST", C, bomb[:9_000], {"content-encoding": "gzip"})
    assert refused.status == 413 and "when decompressed" in refused.json["error"]["message"]
    assert refused.json["error"]["type"] == "RequestEntityTooLargeError"
    assert send_raw(server, stretched).startswith(b"HTTP/1.1 413")
    assert server.ask("POST", C, BODY).status == 200
    assert server.service.bodies.num_open_bytes == 0


E_ACUTE = '{"prompt": "caf\xe9", "max_tokens": 2, "echo": true}'


@pytest.mark.parametrize(
    ("charset", "body"),
    [
        ("", b"\xef\xbb\xbf" + E_ACUTE.encode()),
        ("; charset=UTF-8", E_ACUTE.encode()),
        ("; charset=iso-8859-1", E_ACUTE.encode()),  # the declared charset is wrong
        ("; charset=iso-8859-1", E_ACUTE.encode("latin-1")),
        ('; boundary=x; charset="Windows-1252"', E_ACUTE.encode("latin-1")),
        ("", E_ACUTE.encode("utf-16")),
        ("; charset=utf-16", E_ACUTE.encode("utf-16-le")),
        ("", E_ACUTE.encode("utf-32-be")),
    ],
)
def test_bodies_of_other_charsets_are_read(shared: Any, charset: str, body: bytes) -> None:
    answer = shared.ask("POST", C, body, {"content-type": f"application/json{charset}"})
    assert answer.status == 200 and answer.json["choices"][0]["text"].startswith("caf\xe9")


@pytest.mark.parametrize(
    ("charset", "body", "words"),
    [
        ("", E_ACUTE.encode("latin-1"), "not valid JSON"),
        ("; charset=rot13", E_ACUTE.encode("latin-1"), "not valid JSON"),
        ("", E_ACUTE.encode("utf-16")[:-1], "not valid utf-16"),
    ],
)
def test_invalid_unicode_is_refused(shared: Any, charset: str, body: bytes, words: str) -> None:
    refused = shared.ask("POST", C, body, {"content-type": f"application/json{charset}"})
    assert refused.status == 400 and words in refused.json["error"]["message"]


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["//v1/completions", "/v1/completions/", "/v1//completions//", "/openai//v1/completions/"]
)
def test_empty_path_segments_are_ignored(shared: Any, path: str) -> None:
    assert shared.ask("POST", path, BODY).status == 200


@pytest.mark.parametrize(
    ("path", "tidy"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/v1/models", "/v1/models"),
        ("/v1/models//", "/v1/models"),
        ("//v1//models/toy/", "/v1/models/toy"),
        ("/v1/models//srv/toy", "/v1/models//srv/toy"),
        ("/llm//v1/models//srv//toy/", "/llm/v1/models//srv//toy"),
    ],
)
def test_slashes_in_a_model_name_are_kept(path: str, tidy: str) -> None:
    assert tidy_path(path) == tidy


def test_a_normalized_path_needs_its_key(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["k"], root_path="/llm")
    for path in ("//kv", "/kv/", "/llm//kv", "//v1/models/"):
        assert server.ask("GET", path).status == 401, path
    key = {"x-api-key": "k"}
    assert server.ask("GET", "/kv/", headers=key).status == 401  # operators only
    for path in ("//v1/models/", "/llm/v1/models/", "/llm//v1/models", "//llm/v1/models/toy"):
        assert server.ask("GET", path, headers=key).status == 200, path
    assert server.ask("GET", "//livez/").status == 200


# --- pages ------------------------------------------------------------------------------------------------------------


def test_cors_allows_all_origins(serve: Callable[..., Any]) -> None:
    server = serve(allowed_origins=["*"])
    page = {"origin": "http://localhost:5173"}
    asking = {"access-control-request-method": "PUT", "access-control-request-headers": "authorization,x-odd"}
    preflight = server.ask("OPTIONS", C, headers={**page, **asking})
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "*"
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-odd"
    for path, body, status in ((C, BODY, 200), (C, b"{", 400), ("/nowhere", BODY, 404)):
        answer = server.ask("POST", path, body, page)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "*")
    assert "access-control-allow-origin" not in server.ask("POST", C, BODY).headers


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (C, {"prompt": "x" * 251}),
        (C, {"prompt": [1] * 300}),
        ("/v1/completions/render", {"prompt": [1] * 256}),
    ],
)
def test_a_too_long_context_has_openais_code(
    shared: Any, path: str, field: dict[str, Any], stream: bool
) -> None:
    refused = shared.ask("POST", path, {**field, "stream": stream})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")


def test_a_too_long_context_has_anthropics_message(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.fails_with, server.engine.fail_after = ErrorCode.TOO_LONG, 0
    refused = server.ask(
        "POST", "/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    )
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith("prompt is too long: ")
    for is_least, field in ((False, "messages"), (True, "system")):
        with pytest.raises(RequestError) as error:
            check_length(300, 256, field, is_least=is_least, cause=" (--max-model-len)")
        message = json.loads(anthropic_errors.error_body(error.value, "r"))["error"]["message"]
        assert message.startswith(
            "prompt is too long: 300 tokens > 256 maximum. This model's maximum context"
        )
