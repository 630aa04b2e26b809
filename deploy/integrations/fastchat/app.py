"""The paths of FastChat's worker protocol, answered by a server's API.

A stream is JSON objects with a zero byte behind each. Errors are such objects too: a client of FastChat's reads only those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from quintet.deploy.integrations.fastchat.conversation import TEMPLATE, messages_of
from quintet.deploy.integrations.fastchat.errors import Code, WorkerError, as_worker, error_in, lost
from quintet.deploy.integrations.fastchat.peer import Peer
from quintet.deploy.integrations.fastchat.registration import Registration
from quintet.deploy.integrations.fastchat.request import Counted, Params, completion_of, read, tokenization_of
from quintet.deploy.integrations.fastchat.response import Data, FastChatResponse
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.wire.errors import ErrorCode, RequestError

COMPLETIONS = "/v1/completions"
STREAM, WHOLE = COMPUTED = "/worker_generate_stream", "/worker_generate"
KIND = b"application/octet-stream"
_log = logging.getLogger("quintet")


class _Tokens(msgspec.Struct):
    """An answer of `/tokenize`."""

    tokens: list[int]


def _body_of(error: RequestError, _request_id: str) -> bytes:
    return msgspec.json.encode(WorkerError(Code.VALIDATION, error.message).told)


ERRORS = ErrorShape(_body_of)


class App:
    """One worker."""

    def __init__(self, server: Peer, registration: Registration, bodies: BodyBuffers) -> None:
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
            raise RuntimeError(f"this worker speaks HTTP, not {scope['type']}")
        exchange = HttpRequest(scope, receive, send, ERRORS)
        is_computed = exchange.path in COMPUTED
        self._registration.num_open += is_computed
        try:
            await self._answer(exchange)
        except WorkerError as error:
            await _tell(exchange, error)
        except RequestError as error:
            await exchange.respond_error(error)
        except ClientDisconnected:
            pass
        except Exception:  # noqa: BLE001 - one request's failure must not end the others: log it, and tell its client
            _log.exception("request %s %s failed", exchange.request_id, quote(exchange.path))
            words = f"The worker made a mistake; its log names request {exchange.request_id}."
            await _tell(exchange, WorkerError(Code.INTERNAL, words))
        finally:
            self._registration.num_open -= is_computed

    async def _answer(self, exchange: HttpRequest) -> None:
        answer = self._paths.get(exchange.path)
        if answer is None or exchange.method != "POST":
            paths = ", ".join(self._paths)
            raise RequestError(ErrorCode.NOT_FOUND, f"A worker of FastChat answers POST to {paths}.")
        body = await exchange.read_json_body(self._bodies)
        answering = asyncio.current_task()
        assert answering is not None
        is_gone = False

        def leave() -> None:
            nonlocal is_gone
            is_gone = answering.cancel()

        watcher = exchange.watch_disconnect(leave)
        try:
            await answer(exchange, body)
        except ConnectionError as error:
            raise lost(error) from None
        except asyncio.CancelledError:
            if is_gone:
                raise ClientDisconnected from None
            raise
        finally:
            watcher.cancel()

    # --- what is computed -------------------------------------------------------------------------------------

    async def _stream(self, exchange: HttpRequest, body: bytes) -> None:
        params = read(body, Params)
        flow = await self._server.begin("POST", COMPLETIONS, await self._request_of(params, is_streamed=True))
        try:
            if not flow.is_stream:
                whole = await flow.whole
                raise as_worker(error_in(whole.body, whole.status))
            data, saying = Data(), FastChatResponse()
            await exchange.start_stream(KIND)
            while piece := await flow.take():
                told = [each for event in data.take(piece) for each in saying.take(event)]
                # Each has all the text of those before it; only the end is told by itself.
                for each in told[-2:] if told and told[-1]["finish_reason"] else told[-1:]:
                    await exchange.write(msgspec.json.encode(each) + b"\0")
            await exchange.write(b"", last=True)
        finally:
            self._server.leave(flow)

    async def _generate(self, exchange: HttpRequest, body: bytes) -> None:
        params = read(body, Params)
        request = await self._request_of(params, is_streamed=False)
        whole = await self._server.ask("POST", COMPLETIONS, request)
        if whole.status != 200:
            raise as_worker(error_in(whole.body, whole.status))
        *_, told = FastChatResponse().take(whole.body)
        await exchange.respond_json(told)

    async def _request_of(self, params: Params, is_streamed: bool) -> dict[str, object]:
        is_text = messages_of(params.prompt) is None
        prompt = params.prompt if is_text else await self._ids(params.prompt, params.model)
        return completion_of(params, prompt, is_streamed)

    async def _ids(self, prompt: str, model: str | None) -> list[int]:
        """Return the tokens of a prompt. Raises `WorkerError`, or `ConnectionError`."""
        answer = await self._server.ask("POST", "/tokenize", tokenization_of(prompt, model))
        if answer.status != 200:
            raise as_worker(error_in(answer.body, answer.status))
        return msgspec.json.decode(answer.body, type=_Tokens).tokens

    # --- what is told -----------------------------------------------------------------------------------------

    async def _count(self, exchange: HttpRequest, body: bytes) -> None:
        counted = read(body, Counted)
        try:
            ids = await self._ids(counted.prompt, counted.model)
        except (WorkerError, ConnectionError) as error:
            # FastChat reads the count whatever the code is, and then asks for what it counted: that tells its client.
            told = error.told if isinstance(error, WorkerError) else lost(error).told
            await exchange.respond_json({"count": 0, **told})
        else:
            await exchange.respond_json({"count": len(ids), "error_code": 0})

    async def _status(self, exchange: HttpRequest, _body: bytes) -> None:
        is_there = self._registration.model is not None
        await exchange.respond_json(self._registration.status(), 200 if is_there else 503)

    async def _template(self, exchange: HttpRequest, _body: bytes) -> None:
        await exchange.respond_json({"conv": TEMPLATE})

    async def _details(self, exchange: HttpRequest, _body: bytes) -> None:
        await exchange.respond_json({"context_length": self._registration.max_len})

    async def _embeddings(self, _exchange: HttpRequest, _body: bytes) -> None:
        raise WorkerError(Code.INVALID_MODEL, "This model generates text; it has no embeddings to give.")


async def _tell(exchange: HttpRequest, error: WorkerError) -> None:
    """Tell a client of an error: as a whole answer, or as the last object of a stream."""
    body = msgspec.json.encode(error.told)
    if exchange.started:
        await exchange.write(body + b"\0", last=True)
    elif exchange.path == STREAM:
        await exchange.respond(200, body + b"\0", KIND)
    else:
        await exchange.respond(200, body)
