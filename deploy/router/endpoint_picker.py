"""Endpoint-picker protocol of Kubernetes gateways: Envoy's external processing over gRPC; `server_choice.py` chooses.

A gateway opens a stream per request. It sends head, body and trailers of the request, then those of the answer, as its
modes say, and gets a reply to each. Bodies are returned unchanged. Implements version 1.0 of the endpoint picker protocol
(Gateway API Inference Extension, proposal 004) and ``envoy.service.ext_proc.v3``. The package ``xds-protos`` of the extra
``quintet[gateway]`` has the messages.

    request head ──▶ (body …) ──▶ choice ──▶ head with the endpoint, body ──▶ answer's head ──▶ (its body …) ──▶ end
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import unquote

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from quintet.deploy.router.app import errors_of
from quintet.deploy.router.server_choice import GatewayRequest, Picker, RequestHead
from quintet.deploy.router.upstream import RELAY
from quintet.frontend.api import sse
from quintet.frontend.http.auth import KEY_HEADERS
from quintet.frontend.http.error_shape import headers_of, status_of
from quintet.wire.errors import ConfigError, ErrorCode, RequestError

ENDPOINT = "x-gateway-destination-endpoint"
"""Name of the header, and of the field in the dynamic metadata of `NAMESPACE`."""
NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
MAX_STREAMS = 1024
"""Concurrent requests per gateway connection; more wait in the gateway or use another connection."""
MIN_PING_S = 1.0
"""Minimum interval of a gateway's keepalive pings; gRPC's default closes connections with two pings in five minutes."""
MAX_CHUNK_BYTES = 62_000
"""Bytes of a body per message: Envoy's limit is 64 KiB."""
MAX_HEAD = 1 << 20
"""Maximum bytes of a message besides a body."""
ALIVE = frozenset({"liveness"})
READY = frozenset({"", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"})
"""Service names of the readiness check in gRPC's health protocol."""
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_WHOLE = frozenset({ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL})
_OURS = [RELAY.decode()]
"""Headers that only a router sends to servers; removed from clients' requests."""
_log = logging.getLogger("quintet")


class PickerStream:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._gateway_request: GatewayRequest | None = None
        self._head = RequestHead("", {})
        self._is_picked = False
        self._request_mode = self._answer_mode = int(_DUPLEX)
        """Body modes; the default is the mode that the protocol requires."""
        self.is_over = False
        """True after an immediate response, which ends the stream."""

    def handle(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        """Handle a message of the gateway; yield the replies."""
        try:
            yield from self._handle(message)
        except RequestError as error:
            yield self._refusal(error)
        except Exception:  # noqa: BLE001 - one request's failure must not end the others: log it, answer 500
            _log.exception("the choice for request %s failed", self._request_id)
            text = f"Internal error of the endpoint picker (request {self._request_id}); see its log."
            yield self._refusal(RequestError(ErrorCode.INTERNAL, text))

    def release(self) -> None:
        """End the request when the gateway closes the stream."""
        if self._gateway_request is not None:
            self._gateway_request.release()
            self._gateway_request = None

    @property
    def _request_id(self) -> str:
        return self._head.headers.get("x-request-id", "")

    def _handle(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            if self._gateway_request is not None:
                raise RequestError(
                    ErrorCode.INTERNAL,
                    "The gateway sent two request heads in one stream to the endpoint picker.",
                )
            self._head = _head_of(message)
            self._gateway_request = self._picker.admit(self._head)
            yield from self._on_head(message.request_headers)
            return
        gateway_request = self._gateway_request
        if gateway_request is None:  # a gateway that sends only answers
            raise RequestError(ErrorCode.INTERNAL, "The gateway sent no request head to the endpoint picker.")
        match kind:
            case "request_body":
                yield from self._on_body(gateway_request, message.request_body)
            case "request_trailers":
                if self._request_mode in _WHOLE and not self._is_picked:  # a request without a body
                    yield self._picked(gateway_request.pick(), "request_trailers")
                    return
                if not self._is_picked:
                    yield from self._on_end(gateway_request, has_trailers=True)
                yield ProcessingResponse(request_trailers=TrailersResponse())
            case "response_headers":
                status = _plain(message.response_headers).get(":status", "")
                gateway_request.answered(
                    int(status) if status.isdecimal() and status.isascii() and len(status) == 3 else 0
                )
                yield ProcessingResponse(response_headers=HeadersResponse())
            case "response_body":
                body = message.response_body.body
                is_silence = (
                    body[:1] in (b"", b":") or body == sse.KEEP_ALIVE_EVENT
                )  # a comment is only a keep-alive
                if not is_silence:
                    gateway_request.begin()
                yield ProcessingResponse(response_body=self._unchanged(message.response_body))
            case "response_trailers":
                yield ProcessingResponse(response_trailers=TrailersResponse())

    def _on_head(self, head: HttpHeaders) -> Iterator[ProcessingResponse]:
        if self._request_mode in _WHOLE and not head.end_of_stream:
            # The next message may be trailers, after which the head cannot change.
            common = CommonResponse(header_mutation=HeaderMutation(remove_headers=[ENDPOINT, *_OURS]))
            yield ProcessingResponse(request_headers=HeadersResponse(response=common))
        elif head.end_of_stream or self._request_mode != _DUPLEX:  # no body to wait for
            yield self._picked(self._current().pick(), "request_headers")

    def _on_body(self, gateway_request: GatewayRequest, body: HttpBody) -> Iterator[ProcessingResponse]:
        if self._is_picked:
            yield ProcessingResponse(request_body=BodyResponse())
            return
        gateway_request.take(body.body)
        if self._request_mode in _WHOLE:
            yield self._picked(gateway_request.pick(), "request_body")
            gateway_request.body()
        elif body.end_of_stream or body.end_of_stream_without_message:
            yield from self._on_end(gateway_request, has_trailers=False)

    def _on_end(self, gateway_request: GatewayRequest, has_trailers: bool) -> Iterator[ProcessingResponse]:
        """Choose a server when the request is complete, then release head and body."""
        if self._request_mode != _DUPLEX:
            return
        yield self._picked(gateway_request.pick(), "request_headers")
        body = gateway_request.body()
        starts = range(0, len(body), MAX_CHUNK_BYTES) or range(1)
        for start in starts:
            is_last = start == starts[-1] and not has_trailers
            chunk = StreamedBodyResponse(body=body[start : start + MAX_CHUNK_BYTES], end_of_stream=is_last)
            yield ProcessingResponse(request_body=_body_response(chunk))

    def _current(self) -> GatewayRequest:
        assert self._gateway_request is not None
        return self._gateway_request

    def _unchanged(self, body: HttpBody) -> BodyResponse:
        if self._answer_mode != _DUPLEX:
            return BodyResponse()
        return _body_response(
            StreamedBodyResponse(
                body=body.body,
                end_of_stream=body.end_of_stream,
                end_of_stream_without_message=body.end_of_stream_without_message,
                grpc_message_compressed=body.grpc_message_compressed,
            )
        )

    def _picked(self, endpoint: str, where: str) -> ProcessingResponse:
        """Build the reply with the endpoint: as header and metadata, or only as metadata in a reply to trailers."""
        self._is_picked = True
        mutation = HeaderMutation(set_headers=[_set(ENDPOINT, endpoint.encode())], remove_headers=_OURS)
        if key := self._picker.policy.servers_key:
            mutation.set_headers.append(_set("authorization", f"Bearer {key}".encode("latin-1")))
            mutation.remove_headers.extend(KEY_HEADERS)
        common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        metadata = Struct()
        metadata.update({NAMESPACE: {ENDPOINT: endpoint}})
        if where == "request_trailers":
            return ProcessingResponse(request_trailers=TrailersResponse(), dynamic_metadata=metadata)
        if where == "request_body":
            return ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)
        return ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)

    def _refusal(self, error: RequestError) -> ProcessingResponse:
        self.is_over = True
        status = status_of(error)
        self._picker.metrics.answered(None, status)
        headers = [(b"content-type", b"application/json"), *headers_of(error)]
        return ProcessingResponse(
            immediate_response=ImmediateResponse(
                status=HttpStatus(code=status),
                headers=HeaderMutation(set_headers=[_set(name.decode(), value) for name, value in headers]),
                body=errors_of(self._head.path).body(error, self._request_id),
                details=f"quintet_{error.code}",
            )
        )


def _body_response(chunk: StreamedBodyResponse) -> BodyResponse:
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=chunk)))


def _set(name: str, value: bytes) -> HeaderValueOption:
    """Overwrite a header; Envoy's default appends to the client's value."""
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _plain(head: HttpHeaders) -> dict[str, str]:
    """Return headers by name. Gateways use one of two value fields."""
    return {each.key.lower(): each.value or each.raw_value.decode("latin-1") for each in head.headers.headers}


def _head_of(message: ProcessingRequest) -> RequestHead:
    headers = _plain(message.request_headers)
    path = unquote(headers.get(":path", "").partition("?")[0])
    hints = message.metadata_context.filter_metadata
    among = None
    if SUBSET_NAMESPACE in hints and SUBSET in hints[SUBSET_NAMESPACE].fields:
        hint = hints[SUBSET_NAMESPACE].fields[SUBSET]
        listed = [each.string_value for each in hint.list_value.values] or hint.string_value.split(",")
        among = frozenset(endpoint.strip() for endpoint in listed if endpoint.strip())
    return RequestHead(path, headers, among)


class Processor(ExternalProcessorServicer):
    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Process(
        self, requests: AsyncIterator[ProcessingRequest], _context: object
    ) -> AsyncIterator[ProcessingResponse]:
        stream = PickerStream(self._picker)
        try:
            async for message in requests:
                for answer in stream.handle(message):
                    yield answer
                if stream.is_over:
                    return
        finally:
            stream.release()


class Health(HealthServicer):
    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> object:
        """Return the health of one of the protocol's service names."""
        if request.service not in ALIVE | READY:
            names = ", ".join(sorted(ALIVE | READY - {""}))
            message = f"unknown service {request.service!r}; use one of {names}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        is_healthy = request.service in ALIVE or self._picker.is_ready
        status = HealthCheckResponse.SERVING if is_healthy else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)


async def listen(
    picker: Picker, host: str, port: int, tls: Path | None, silent_s: float
) -> tuple[grpc.aio.Server, int]:
    """Serve gateways at this address; return the server and its port. ``tls``: the folder of ``tls.crt`` and ``tls.key``.

    A gateway without keepalive for ``silent_s`` is disconnected and its requests end. Raises `ConfigError`.
    """
    half_ms = max(1, round(500 * silent_s))
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # fail on a used port instead of sharing it
            ("grpc.max_receive_message_length", picker.policy.bodies.max_bytes + MAX_HEAD),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.keepalive_time_ms", half_ms),
            ("grpc.keepalive_timeout_ms", half_ms),
            ("grpc.http2.ping_timeout_ms", half_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * MIN_PING_S)),
        ]
    )
    add_ExternalProcessorServicer_to_server(Processor(picker), server)
    add_HealthServicer_to_server(Health(picker), server)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(where)
        else:
            pair = ((tls / "tls.key").read_bytes(), (tls / "tls.crt").read_bytes())
            bound = server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
    except OSError as error:
        raise ConfigError(
            f"--endpoint-picker-tls {tls}: {error}; set it to a folder with tls.crt and tls.key in PEM"
        ) from None
    except RuntimeError as error:
        raise ConfigError(
            f"--endpoint-picker cannot listen on {where} ({error}); stop the program that uses it, or set another port"
        ) from None
    await server.start()
    return server, bound
