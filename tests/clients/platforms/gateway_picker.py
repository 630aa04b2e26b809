"""The endpoint picker of ``quintet route`` with a gRPC client and Envoy's published messages."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

ENDPOINT = "x-gateway-destination-endpoint"
COMPLETIONS = "/v1/completions"


class Gateway:
    """Stream of one client request, as Envoy sends it."""

    def __init__(
        self, channel: grpc.Channel, mode: int | None = None, among: list[str] | None = None
    ) -> None:
        self._said: queue.Queue[ProcessingRequest | None] = queue.Queue()
        self._answers = ExternalProcessorStub(channel).Process(iter(self._said.get, None), timeout=60)
        self._mode, self._among = mode, among

    def send(self, **what: object) -> None:
        message = ProcessingRequest(**what)
        if self._mode is not None:
            modes = ProtocolConfiguration(request_body_mode=self._mode, response_body_mode=self._mode)
            message.protocol_config.CopyFrom(modes)
            self._mode = None
        if self._among is not None:
            hint = {"x-gateway-destination-endpoint-subset": self._among}
            message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
        self._said.put(message)

    def head(self, path: str = COMPLETIONS, is_all: bool = False, **headers: str) -> None:
        pairs = {":method": "GET" if is_all else "POST", ":path": path, ENDPOINT: "1.2.3.4:5", **headers}
        pair_headers = [HeaderValue(key=k.replace("_", "-"), raw_value=v.encode()) for k, v in pairs.items()]
        self.send(request_headers=HttpHeaders(headers=HeaderMap(headers=pair_headers), end_of_stream=is_all))

    def body(self, piece: bytes, is_last: bool = True) -> None:
        self.send(request_body=HttpBody(body=piece, end_of_stream=is_last))

    def answer(self) -> ProcessingResponse:
        return next(self._answers)

    def end(self) -> None:
        """End the request; wait for the picker."""
        self._said.put(None)
        assert list(self._answers) == []


def endpoint_in(answer: ProcessingResponse, field: str = "request_headers") -> str:
    common = getattr(answer, field).response
    options = {option.header.key: option for option in common.header_mutation.set_headers}
    assert options[ENDPOINT].append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    endpoint = options[ENDPOINT].header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"][ENDPOINT] == endpoint
    assert common.clear_route_cache and "x-quintet-relay" in common.header_mutation.remove_headers
    return endpoint


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def is_ready(url: str) -> bool:
    try:
        return bool(get(url + "/readyz"))
    except urllib.error.HTTPError:
        return False


@contextlib.contextmanager
def routing(server: str, *flags: str) -> Iterator[tuple[str, str]]:
    """Run the router; yield its URL and the picker's address."""
    command = [
        sys.executable,
        "-m",
        "quintet",
        "route",
        "--engine",
        server,
        "--port",
        "0",
        "--poll-interval",
        "0.1",
    ]
    router = subprocess.Popen([*command, "--endpoint-picker", "0", *flags], stderr=subprocess.PIPE, text=True)
    assert router.stderr is not None
    try:
        ports: dict[str, str] = {}
        for line in router.stderr:
            if found := re.search(r"(endpoint picker|listening) on 127.0.0.1 port (\d+)", line):
                ports[found[1]] = found[2]
            if len(ports) == 2:
                break
        else:
            raise AssertionError("the router ended")
        threading.Thread(target=router.stderr.read, daemon=True).start()
        url = f"http://127.0.0.1:{ports['listening']}"
        until_s = time.monotonic() + 60
        while not is_ready(url):
            assert time.monotonic() < until_s, "the server is not healthy"
            time.sleep(0.05)  # the router sends no ready event: poll
        yield url, f"127.0.0.1:{ports['endpoint picker']}"
    finally:
        router.terminate()
        assert router.wait(30) == 0


def num_open(router: str) -> int:
    return int(json.loads(get(router + "/servers"))[0]["num_open"])


def check_streamed(router: str, channel: grpc.Channel, server: str, model: str) -> None:
    """Check the protocol's streamed mode: headers, request body chunks, response chunks."""
    text = json.dumps({"model": model, "prompt": "def f(x):" * 9000, "max_tokens": 1}).encode()
    gateway = Gateway(channel, ProcessingMode.FULL_DUPLEX_STREAMED)
    gateway.head()
    for start in range(0, len(text), 30_000):
        gateway.body(text[start : start + 30_000], is_last=False)
    gateway.body(b"")
    assert f"http://{endpoint_in(gateway.answer())}" == server
    assert num_open(router) == 1
    pieces = [gateway.answer().request_body.response.body_mutation.streamed_response for _ in range(2)]
    assert b"".join(piece.body for piece in pieces) == text
    assert [piece.end_of_stream for piece in pieces] == [False, True]
    status = HeaderMap(headers=[HeaderValue(key=":status", raw_value=b"200")])
    gateway.send(response_headers=HttpHeaders(headers=status))
    assert gateway.answer().HasField("response_headers")
    gateway.send(response_body=HttpBody(body=b"data: 1\n\n", end_of_stream=True))
    piece = gateway.answer().response_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b"data: 1\n\n", True)
    gateway.end()
    assert num_open(router) == 0
    assert f'requests_total{{server="{server}",status="200"}} 1.0' in get(router + "/metrics").decode()


def check_other_modes(channel: grpc.Channel, server: str) -> None:
    expected = server.removeprefix("http://")
    gateway = Gateway(channel)
    gateway.head("/v1/models", is_all=True)
    assert endpoint_in(gateway.answer()) == expected
    gateway.end()

    gateway = Gateway(channel, ProcessingMode.BUFFERED)
    gateway.head()
    assert gateway.answer().WhichOneof("response") == "request_headers"
    gateway.body(b'{"prompt":"x"}', is_last=False)
    answer = gateway.answer()
    assert endpoint_in(answer, "request_body") == expected
    assert not answer.request_body.response.HasField("body_mutation")
    gateway.send(request_trailers=HttpTrailers())
    assert gateway.answer().HasField("request_trailers")
    gateway.end()

    gateway = Gateway(channel, ProcessingMode.BUFFERED)
    gateway.head()
    mutation = gateway.answer().request_headers.response.header_mutation
    assert list(mutation.remove_headers) == [ENDPOINT, "x-quintet-relay"], (
        "a client could choose the endpoint"
    )
    gateway.send(request_trailers=HttpTrailers())
    answer = gateway.answer()
    assert answer.HasField("request_trailers")
    assert answer.dynamic_metadata["envoy.lb"][ENDPOINT] == expected
    gateway.end()

    gateway = Gateway(channel, ProcessingMode.STREAMED)
    gateway.head()
    assert endpoint_in(gateway.answer()) == expected
    gateway.end()

    gateway = Gateway(channel)
    gateway.head()
    gateway.body(b'{"prompt":"x"}', is_last=False)
    gateway.send(request_trailers=HttpTrailers())
    assert endpoint_in(gateway.answer()) == expected
    piece = gateway.answer().request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b'{"prompt":"x"}', False)
    assert gateway.answer().HasField("request_trailers")
    gateway.end()


def rejection(gateway: Gateway, status: int, words: str) -> dict[str, bytes]:
    message = gateway.answer().immediate_response
    assert message.status.code == status, message
    assert words in json.loads(message.body)["error"]["message"], message.body
    gateway.end()
    return {option.header.key: option.header.raw_value for option in message.headers.set_headers}


def check_tls(server: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder, "tls.key"), Path(folder, "tls.crt")
        words = [
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=picker",
        ]
        alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", *words, *alternative, "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with (
            routing(server, "--endpoint-picker-tls", folder) as (_, address),
            grpc.secure_channel(address, trusted) as channel,
        ):
            gateway = Gateway(channel)
            gateway.head(is_all=True)
            assert f"http://{endpoint_in(gateway.answer())}" == server
            gateway.end()


@contextlib.contextmanager
def wire_to(address: str) -> Iterator[tuple[str, threading.Event]]:
    """Forward bytes between a client and this address. Once the event is set, drop them without closing."""
    is_cut = threading.Event()
    host, _, port = address.rpartition(":")

    def forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (piece := source.recv(65536)) and not is_cut.is_set():
                sink.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []
        ends: list[socket.socket] = []

        def accept() -> None:
            near, _ = listener.accept()
            ends.extend((near, socket.create_connection((host, int(port)))))
            for pair in (ends, ends[::-1]):
                threads.append(threading.Thread(target=forward, args=pair))
                threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", is_cut
        accepting.join()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()


def check_disappearance(server: str) -> None:
    """A gateway that disappears without closing: its requests time out."""
    with (
        routing(server, "--silent-timeout", "1") as (router, address),
        wire_to(address) as (listener, is_cut),
        grpc.insecure_channel(listener) as channel,
    ):
        gateway = Gateway(channel)
        gateway.head(is_all=True)
        gateway.answer()
        assert num_open(router) == 1
        time.sleep(2)  # a silent gateway that is alive is kept
        assert num_open(router) == 1
        is_cut.set()
        until_s = time.monotonic() + 30
        while num_open(router):
            assert time.monotonic() < until_s, "the request is still counted"
            time.sleep(0.1)


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Make an HTTP/2 frame of stream 0."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload


SETTINGS, PING, GOAWAY = 4, 6, 7
MAX_CONCURRENT_STREAMS = 3


def check_connection(address: str) -> None:
    """Check SETTINGS and PING with a raw connection: concurrent streams and keepalive."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire, wire.makefile("rb") as reader:
        wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        settings: dict[int, int] = {}
        for number in range(5):
            wire.sendall(frame(PING, number.to_bytes(8, "big")))
            while True:
                head = reader.read(9)
                payload = reader.read(int.from_bytes(head[:3], "big"))
                assert head[3] != GOAWAY, payload
                if head[3] == SETTINGS:
                    for at in range(0, len(payload), 6):
                        settings[int.from_bytes(payload[at : at + 2], "big")] = int.from_bytes(
                            payload[at + 2 : at + 6], "big"
                        )
                if head[3] == PING and head[4]:
                    break
            time.sleep(1.1)  # a shorter interval is rejected
    assert settings[MAX_CONCURRENT_STREAMS] == 1024


def main(server: str, model: str) -> None:
    with routing(server) as (router, address), grpc.insecure_channel(address) as channel:
        health = HealthStub(channel)
        for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            health_response = health.Check(HealthCheckRequest(service=name), timeout=30)
            assert health_response.status == HealthCheckResponse.SERVING, name
        check_streamed(router, channel, server, model)
        check_other_modes(channel, server)
        check_connection(address)
        gateway = Gateway(channel, among=["10.9.9.9:1"])
        gateway.head(is_all=True)
        assert rejection(gateway, 503, "None of the 1 endpoints")["retry-after"] == b"1"
    check_disappearance(server)
    check_tls(server)
    keyed = (
        "--api-key",
        "k",
        "--max-open-per-key",
        "1",
        "--engine-api-key",
        "inner",
        "--max-body-bytes",
        "100",
    )
    with routing(server, *keyed) as (_, address), grpc.insecure_channel(address) as channel:
        gateway = Gateway(channel)
        gateway.head()
        rejection(gateway, 401, "No API key was sent")
        first = Gateway(channel)
        first.head(is_all=True, authorization="Bearer k")
        mutation = first.answer().request_headers.response.header_mutation
        assert mutation.set_headers[1].header.raw_value == b"Bearer inner"
        assert list(mutation.remove_headers) == ["x-quintet-relay", "x-api-key", "api-key"]
        second = Gateway(channel)
        second.head(x_api_key="k")
        assert rejection(second, 429, "at most 1 are allowed")["retry-after"] == b"1"
        first.end()
        gateway = Gateway(channel)
        gateway.head("/v1/messages", x_api_key="k")
        gateway.body(bytes(200), is_last=False)
        rejection(gateway, 413, "exceeds 100 bytes")


main(*sys.argv[1:])
