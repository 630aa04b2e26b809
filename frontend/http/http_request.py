"""One HTTP request and its response, over raw ASGI.

Handles headers, bodies and disconnects. Every response of the server is sent here, so that common headers are added in
one place, and streamed chunks reach the socket without another layer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from quintet.frontend.http.bodies import BodyBuffers, OpenBody
from quintet.frontend.http.encodings import ACCEPTED, Inflater, as_utf8, inflater_of
from quintet.frontend.http.error_shape import ErrorShape, headers_of, status_of
from quintet.frontend.resume.token_relay import RELAY_HEADER, PartialResponse
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import MAX_SHOWN, shown

Header = tuple[bytes, bytes]

JSON, EVENTS = b"application/json", b"text/event-stream"
CONNECTION = "quintet.connection"
"""ASGI extension: the server passes the connection's ``abort``, and a stream passes its ``break_silence``."""
LINE_READERS = (b"Go-http-client", b"req/")  # langchaingo; LangChain for Elixir
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID = 256
REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")
"""Valid client request ids: the response repeats the id in every event of every choice."""


class ClientDisconnected(Exception):
    """The client closed the connection; no response can be sent."""


class HttpRequest:
    """A request being answered, passed to endpoints in ``scope["http_request"]``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, errors: ErrorShape) -> None:
        self.arrival_ns = time.monotonic_ns()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        """Raw query string."""
        self.route = "other"
        """Path pattern of the matched endpoint, for metrics."""
        self.path_params: dict[str, str] = {}
        self.errors = errors
        """Error format of the path's API."""
        self.status = 0
        self.num_bytes = 0
        """Bytes of the body, plus those of an unstreamed response."""
        self.headers_out: list[Header] = []
        self.before_start: Callable[[], Awaitable[list[Header]]] | None = None
        """Returns headers that are known only when the response starts."""
        self.partial_response: PartialResponse | None = None
        """Response received from another server, to continue."""
        self._connection: dict[str, Callable[[], None]] = scope.get("extensions", {}).get(CONNECTION, {})
        self._receive = receive
        self._send = send
        self._body: bytes | None = None
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.given_id = given = self.header(REQUEST_ID_HEADER)
        """The client's X-Request-Id, unchecked."""
        self.request_id = given if given and REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        """Valid X-Request-Id of the client, or a generated one; echoed in the response."""

    def header(self, name: str) -> str | None:
        """Return the first header of this lower-case name."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def has_flag(self, name: str) -> bool:
        """True if the query has this parameter, with no value or one other than ``0`` and ``false``."""
        value = self.query_param(name)
        return value is not None and value.lower() not in {"0", "false"}

    def query_param(self, name: str) -> str | None:
        """Return the last value of a query parameter, or None."""
        values = parse_qs(self.query, keep_blank_values=True).get(name)
        return None if values is None else values[-1]

    @property
    def started(self) -> bool:
        """True if the response's status has been sent."""
        return self.status != 0

    @property
    def wants_relay(self) -> bool:
        """True if the client asks for token ids, to resume the stream at another server."""
        return self.header(RELAY_HEADER) is not None

    @property
    def reads_event_ids(self) -> bool:
        """False for an Accept header without events, and for some clients without one: they take every line for JSON."""
        unnamed = b"" if self._headers.get(b"user-agent", b"").startswith(LINE_READERS) else EVENTS
        return self.wants_relay or EVENTS in self._headers.get(b"accept", unnamed)

    # --- in ---------------------------------------------------------------------------------------------------

    async def read_json_body(self, bodies: BodyBuffers) -> bytes:
        """Return the whole body, decompressed, in UTF-8. Later calls return the same bytes.

        Raises `RequestError`: 415 for a wrong type or encoding, 413 above the size limit, 408 if the client stops sending.
        503 if unfinished bodies exceed their common limit and this one has waited longest. A missing content type is accepted.
        """
        if self._body is None:
            self._body = await self._receive_json(bodies)
            self.num_bytes += len(self._body)
        return self._body

    def release_body(self) -> None:
        """Drop the body after the request. The request and its scope form a cycle that only the garbage collector would free."""
        self._body = None

    def replace_body(self, body: bytes, partial_response: PartialResponse) -> None:
        """Replace the body by that of an original request, to continue its response after ``partial_response``."""
        self._body, self.partial_response = body, partial_response

    async def _receive_json(self, bodies: BodyBuffers) -> bytes:
        content_type = self.header("content-type") or ""
        kind = content_type.partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not kind.endswith("+json"):
            raise RequestError(
                ErrorCode.UNSUPPORTED_MEDIA,
                f"Content-Type is {shown(kind)}; send JSON with -H 'Content-Type: application/json'.",
            )
        announced = self.header("content-length")
        if announced is not None and announced.isdigit() and int(announced) > bodies.max_bytes:
            raise _too_large(f"is {announced[:MAX_SHOWN]} bytes", bodies.max_bytes)
        body = await self._receive_whole(bodies)
        is_utf8 = body.startswith(b"{") and body[1:2] != b"\0" and "charset" not in content_type.lower()
        return body if is_utf8 else as_utf8(body, content_type)

    async def _receive_whole(self, bodies: BodyBuffers) -> bytes:
        """Return the body, decompressed. The size limit applies both to received and to decompressed bytes."""
        encoding = self.header("content-encoding")
        inflater = None if encoding is None else self._inflater(encoding)
        chunks: list[bytes] = []
        num_received = num_bytes = 0
        body = bodies.open()
        try:
            while True:
                message = await self._next_message(bodies, body)
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                received: bytes = message.get("body", b"")
                num_received += len(received)
                bodies.grow(body, len(received))
                if num_received > bodies.max_bytes:
                    raise _too_large(f"has more than {bodies.max_bytes} bytes", bodies.max_bytes)
                if inflater is None:
                    chunks.append(received)
                else:
                    for chunk in inflater.feed(received):
                        num_bytes += len(chunk)
                        bodies.grow(body, len(chunk))
                        if num_bytes > bodies.max_bytes:
                            what = f"has more than {bodies.max_bytes} bytes when decompressed"
                            raise _too_large(what, bodies.max_bytes)
                        chunks.append(chunk)
                        bodies.enforce_limit()
                        await asyncio.sleep(0)
                        if body.is_given_up:
                            raise self._given_up(bodies)
                if not message.get("more_body", False):
                    break
                bodies.enforce_limit()
        finally:
            bodies.close(body)
        if inflater is not None:
            inflater.check_end()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _inflater(self, encoding: str) -> Inflater | None:
        try:
            return inflater_of(encoding)
        except RequestError:
            self.headers_out.append((b"accept-encoding", ACCEPTED.encode()))
            raise

    async def _next_message(self, bodies: BodyBuffers, body: OpenBody) -> Message:
        next_chunk_timeout_s, is_slow = bodies.next_chunk_timeout_s(body)
        try:
            async with asyncio.timeout(0 if body.is_given_up else next_chunk_timeout_s) as body.waiting:
                return await self._receive()
        except TimeoutError:
            if body.is_given_up:
                raise self._given_up(bodies) from None
            if is_slow:
                raise self._unread(
                    ErrorCode.TIMEOUT,
                    f"The request body arrived too slowly: {body.num_bytes} bytes; at least {bodies.bytes_per_s:g} bytes/s are "
                    f"required after {bodies.progress_s:g} s. Send it faster.",
                ) from None
            raise self._unread(
                ErrorCode.TIMEOUT,
                f"The request body stopped after {body.num_bytes} bytes: nothing was received for {bodies.progress_s:g} s. "
                "Send it again.",
            ) from None
        finally:
            body.waiting = None

    def _given_up(self, bodies: BodyBuffers) -> RequestError:
        return self._unread(
            ErrorCode.UNAVAILABLE,
            f"Unfinished request bodies exceed {bodies.max_open_bytes} bytes, and this one has been idle longest; "
            "retry later.",
        )

    def _unread(self, code: ErrorCode, message: str) -> RequestError:
        """Build the error for a body that was not read to its end, and close the connection after it."""
        self.headers_out.append((b"connection", b"close"))
        return RequestError(code, message)

    def watch_disconnect(self, gone: Callable[[], None]) -> asyncio.Task[None]:
        """Call ``gone`` if the client disconnects before the response is complete. Cancel the task when done.

        Call after the body was read.
        """

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone()

        return asyncio.get_running_loop().create_task(watch())

    # --- out --------------------------------------------------------------------------------------------------

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        self.num_bytes += len(body)
        length = b"%d" % len(body)
        await self._start(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, value: object, status: int = 200) -> None:
        await self.respond(status, msgspec.json.encode(value))

    async def respond_error(self, error: RequestError) -> None:
        """Send an error in the format of the API, with its headers."""
        body = self.errors.body(error, self.request_id)
        await self.respond(status_of(error), body, headers=headers_of(error))

    async def start_stream(self, content_type: bytes, headers: Iterable[Header] = ()) -> None:
        """Send the head of a streamed response; follow with `write`."""
        await self._start(200, [(b"content-type", content_type), *headers])

    async def write(self, chunk: bytes, last: bool = False) -> None:
        """Send a chunk of a streamed response; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not last})

    def abort(self) -> None:
        """Reset the connection without waiting for the client to read pending output."""
        if (abort := self._connection.get("abort")) is not None:
            abort()

    def register_break_silence(self, break_silence: Callable[[], None]) -> None:
        """Register a callback that writes a comment to an idle stream, to detect a lost client."""
        self._connection["break_silence"] = break_silence

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers += self.headers_out
        if self.before_start is not None:
            headers += await self.before_start()
        request_id = self.request_id.encode()
        headers.append((b"x-request-id", request_id))
        if self.errors.id_header:
            headers.append((self.errors.id_header, request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _too_large(what: str, max_bytes: int) -> RequestError:
    return RequestError(
        ErrorCode.TOO_LARGE,
        f"The request body {what}; this server accepts at most {max_bytes} bytes. Send a smaller body, "
        "or raise --max-body-bytes.",
    )
