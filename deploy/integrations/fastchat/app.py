"""Endpoints of FastChat's worker protocol, implemented with requests to the server's API.

A stream consists of JSON objects, each followed by a zero byte. Errors are such objects too, with HTTP status 200.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from quintet.deploy.http_client.pool import ConnectionPool, json_request
from quintet.deploy.integrations.fastchat.protocol import (
    TEMPLATE,
    Code,
    EventData,
    FastChatResponse,
    Params,
    TokenCountRequest,
    WorkerError,
    as_worker,
    completion_of,
    error_in,
    messages_of,
    read,
    server_lost,
    tokenization_of,
)
from quintet.deploy.integrations.fastchat.registration import Registration
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.wire.errors import ErrorCode, RequestError

COMPLETIONS = "/v1/completions"
STREAM, WHOLE = COMPUTED = "/worker_generate_stream", "/worker_generate"
KIND = b"application/octet-stream"
_log = logging.getLogger("quintet")


class _Tokens(msgspec.Struct):
    """Response of `/tokenize`."""

    tokens: list[int]


def _body_of(error: RequestError, _request_id: str) -> bytes:
    return msgspec.json.encode(WorkerError(Code.VALIDATION, error.message).body)


ERRORS = ErrorShape(_body_of)


class FastChatApp:
    def __init__(self, server: ConnectionPool, registration: Registration, bodies: BodyBuffers) -> None:
        self._server, self._registration, self._bodies = server, registration, bodies
        self._paths: dict[str, Callable[[HttpRequest, bytes], Awaitable[None]]] = {
            STREAM: self._stream,
            WHOLE: self._generate,
            "/worker_get_status": self._status,
            "/worker_get_conv_template": self._template,
            "/worker_get_embeddings": self._embeddings,
            "/count_token": self._count,
            "/model_details": self._details,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the worker supports HTTP only, not {scope['type']}")
        http_request = HttpRequest(scope, receive, send, ERRORS)
        is_computed = http_request.path in COMPUTED
        self._registration.num_open += is_computed
        try:
            await self._answer(http_request)
        except WorkerError as error:
            await _respond_error(http_request, error)
        except RequestError as error:
            await http_request.respond_error(error)
        except ClientDisconnected:
            pass
        except Exception:  # noqa: BLE001 - isolates failures of single requests
            _log.exception("request %s %s failed", http_request.request_id, quote(http_request.path))
            message = f"Internal worker error (request {http_request.request_id})."
            await _respond_error(http_request, WorkerError(Code.INTERNAL, message))
        finally:
            self._registration.num_open -= is_computed

    async def _answer(self, http_request: HttpRequest) -> None:
        answer = self._paths.get(http_request.path)
        if answer is None or http_request.method != "POST":
            paths = ", ".join(self._paths)
            raise RequestError(
                ErrorCode.NOT_FOUND, f"Unknown endpoint; this FastChat worker supports POST to {paths}."
            )
        body = await http_request.read_json_body(self._bodies)
        task = asyncio.current_task()
        assert task is not None
        is_disconnected = False

        def cancel() -> None:
            nonlocal is_disconnected
            is_disconnected = task.cancel()

        watcher = http_request.watch_disconnect(cancel)
        try:
            await answer(http_request, body)
        except ConnectionError as error:
            raise server_lost(error) from None
        except asyncio.CancelledError:
            if is_disconnected:
                raise ClientDisconnected from None
            raise
        finally:
            watcher.cancel()

    # --- generation -------------------------------------------------------------------------------------

    async def _stream(self, http_request: HttpRequest, body: bytes) -> None:
        params = read(body, Params)
        completion = await self._request_of(params, is_streamed=True)
        flow = await self._server.open(json_request(self._server.target, "POST", COMPLETIONS, completion))
        try:
            if not flow.is_stream:
                whole = await flow.whole
                raise as_worker(error_in(whole.body, whole.status))
            events, response = EventData(), FastChatResponse()
            await http_request.start_stream(KIND)
            while chunk := await flow.take():
                objects = [each for event in events.take(chunk) for each in response.take(event)]
                # Each object contains all text so far, so only the last one is sent, and the final one with the finish reason.
                for each in objects[-2:] if objects and objects[-1]["finish_reason"] else objects[-1:]:
                    await http_request.write(msgspec.json.encode(each) + b"\0")
            await http_request.write(b"", last=True)
        finally:
            self._server.give_back(flow)

    async def _generate(self, http_request: HttpRequest, body: bytes) -> None:
        params = read(body, Params)
        request = await self._request_of(params, is_streamed=False)
        whole = await self._server.ask("POST", COMPLETIONS, request)
        if whole.status != 200:
            raise as_worker(error_in(whole.body, whole.status))
        *_, final = FastChatResponse().take(whole.body)
        await http_request.respond_json(final)

    async def _request_of(self, params: Params, is_streamed: bool) -> dict[str, object]:
        is_text = messages_of(params.prompt) is None
        prompt = params.prompt if is_text else await self._ids(params.prompt, params.model)
        return completion_of(params, prompt, is_streamed)

    async def _ids(self, prompt: str, model: str | None) -> list[int]:
        """Tokenize a prompt. Raises `WorkerError` or `ConnectionError`."""
        answer = await self._server.ask("POST", "/tokenize", tokenization_of(prompt, model))
        if answer.status != 200:
            raise as_worker(error_in(answer.body, answer.status))
        return msgspec.json.decode(answer.body, type=_Tokens).tokens

    # --- information -----------------------------------------------------------------------------------------

    async def _count(self, http_request: HttpRequest, body: bytes) -> None:
        counted = read(body, TokenCountRequest)
        try:
            ids = await self._ids(counted.prompt, counted.model)
        except (WorkerError, ConnectionError) as error:
            # FastChat ignores the error code here; its following generation request reports the error to the client.
            fields = error.body if isinstance(error, WorkerError) else server_lost(error).body
            await http_request.respond_json({"count": 0, **fields})
        else:
            await http_request.respond_json({"count": len(ids), "error_code": 0})

    async def _status(self, http_request: HttpRequest, _body: bytes) -> None:
        is_ready = self._registration.model is not None
        await http_request.respond_json(self._registration.status(), 200 if is_ready else 503)

    async def _template(self, http_request: HttpRequest, _body: bytes) -> None:
        await http_request.respond_json({"conv": TEMPLATE})

    async def _details(self, http_request: HttpRequest, _body: bytes) -> None:
        await http_request.respond_json({"context_length": self._registration.max_len})

    async def _embeddings(self, _exchange: HttpRequest, _body: bytes) -> None:
        raise WorkerError(Code.INVALID_MODEL, "This model does not support embeddings.")


async def _respond_error(http_request: HttpRequest, error: WorkerError) -> None:
    """Send an error: as the response, or as the last object of a stream."""
    body = msgspec.json.encode(error.body)
    if http_request.started:
        await http_request.write(body + b"\0", last=True)
    elif http_request.path == STREAM:
        await http_request.respond(200, body + b"\0", KIND)
    else:
        await http_request.respond(200, body)
