"""Frontend over real HTTP on an ephemeral port, with a fake engine.

The engine answers `Submit` with the messages of the real processes: token ``i`` of a choice is the text
`` t<i>`` (id ``10 + i``), ``max_tokens`` of them, one step at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from openai import OpenAI

from quintet.frontend.app import FrontendApp
from quintet.frontend.http.server import make_server
from quintet.frontend.service import Service
from quintet.wire import messages
from quintet.wire.channels import Channel, RowSpans
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import (
    Alternative,
    Cancel,
    Detokenized,
    DetokenizeQuery,
    Failed,
    Finish,
    FinishReason,
    PositionLogprobs,
    Resume,
    Resumed,
    RowLogprobs,
    Started,
    Submit,
    Text,
    TextPrompt,
    Tokenized,
    TokenizeQuery,
    TokenPrompt,
)
from quintet.wire.metrics import Metrics
from quintet.wire.pooling import Pooled
from quintet.wire.step import DraftCounts
from quintet.wire.supervision import (
    MetricsQuery,
    MetricsReport,
    ProcessMetrics,
    ProcessSlot,
    SlotHistory,
    SlotState,
    Topology,
)
from tests.frontend.configs import make_config

DEADLINE_S = 10.0


def topology(version: int, **states: SlotState) -> Topology:
    roles = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
    return Topology(
        version,
        [
            ProcessSlot(WorkerId(role, 0, 1), "ipc://nowhere", 1, states.get(str(role), SlotState.READY))
            for role in roles
        ],
    )


def alternative(token_id: int, logprob: float, rank: int) -> Alternative:
    token = f" t{token_id - 10}"
    return Alternative(token_id, logprob, token, token.encode(), rank)


def position(token_id: int, num_top: int, offset: int) -> PositionLogprobs:
    top = [alternative(token_id + k, -0.5 * (k + 1), k + 1) for k in range(num_top)]
    return PositionLogprobs(alternative(token_id, -0.5, 1), top, offset)


@dataclass
class FakeEngine:
    """All processes except the frontend. ``held``: send nothing for new requests until `release`."""

    service: Service | None = None
    sent: list[tuple[Role, int, msgspec.Struct]] = field(default_factory=list)
    held: bool = False
    is_supervisor_silent: bool = False
    fail_after: int | None = None
    """Fail requests after this many tokens."""
    fails_with: ErrorCode = ErrorCode.INTERNAL
    silent_after: int | None = None
    """Send nothing more after this many tokens."""
    script: list[list[tuple[int, int, str]]] = field(default_factory=list)
    """Text of each token by channel and call, for requests with parsers. The last token stops the request."""
    drafts: DraftCounts | None = None
    """Draft tokens of each choice."""
    resumed: Resumed = field(default_factory=lambda: Resumed(0, None))
    """Answer of the core for a resumed stream."""
    live: dict[int, Submit] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        loop = asyncio.get_running_loop()
        match message:
            case Submit():
                self.live[message.request_id] = message
                if not self.held:
                    loop.call_soon(self.begin, message)
            case Cancel():
                loop.call_soon(self.abort, message)
            case TokenizeQuery(prompt=TextPrompt(text=text)):
                ids = list(range(len(text)))
                strs = list(text) if message.return_token_strs else None
                loop.call_soon(self.deliver, Tokenized(message.query_id, pack_i32(ids), strs))
            case TokenizeQuery():
                loop.call_soon(self.deliver, Tokenized(message.query_id, pack_i32([7, 8, 9])))
            case DetokenizeQuery():
                ids = list(unpack_i32(message.token_ids))
                answer = Detokenized(message.query_id, "".join(f" t{i - 10}" for i in ids))
                if message.opened is not None and message.opened.parsing is not None:
                    answer.num_reasoning_tokens = len(ids)
                loop.call_soon(self.deliver, answer)
            case MetricsQuery() if not self.is_supervisor_silent:
                loop.call_soon(self.deliver, self.report(message))
            case Resume():
                resumed = msgspec.structs.replace(self.resumed, query_id=message.query_id)
                loop.call_soon(self.deliver, resumed)
        with self.arrived:
            self.sent.append((role, index, message))
            self.arrived.notify_all()
        return True

    def deliver(self, message: Any) -> None:
        assert self.service is not None
        self.service.handle(message)

    def report(self, query: MetricsQuery) -> MetricsReport:
        """Answer as the supervisor does: one core died after 50 tokens, one detokenizer left after 7 hits."""
        processes = [ProcessMetrics(query.asker, 1, SlotState.READY, 0, 0, 0, 0, query.metrics)]
        for index in (0, 1):
            metrics = Metrics()
            metrics.gauge("num_requests_running", "Running.").set(2 + index)
            metrics.counter("generation_tokens", "Tokens.").inc(100)
            metrics.histogram("request_queue_time_seconds", "Queue.", (0.1, 1.0)).observe(0.05 + index)
            worker = WorkerId(Role.CORE, index, 1)
            processes.append(
                ProcessMetrics(worker, 1, SlotState.READY, 2_000_000_000, 5, 0, index, metrics.encoded())
            )
        before, departed = Metrics(), Metrics()
        before.counter("generation_tokens", "Tokens.").inc(50)
        before.counter("process_restarts", "Restarts.").inc(2)
        departed.counter("stop_string_hits", "Hits.").inc(7)
        past = [
            SlotHistory(Role.CORE, 1, before.encoded()),
            SlotHistory(Role.DETOKENIZER, 3, departed.encoded()),
        ]
        return MetricsReport(query.query_id, processes, past)

    def begin(self, submit: Submit) -> None:
        if isinstance(submit.prompt, TextPrompt) and len(submit.prompt.text) > 250:
            message = f"The prompt has {len(submit.prompt.text)} tokens; the model takes at most 256."
            self.deliver(Failed(submit.request_id, ErrorCode.TOO_LONG, message, "prompt"))
            return
        if submit.spec.pooling is not None:
            self.pool(submit)
            return
        num_sent = 0 if submit.spec.replays else len(submit.spec.output_ids) // 4
        sent_texts = [self.piece(submit, index) for index in range(num_sent)]
        self.step(submit, len(sent_texts), sum(map(len, sent_texts)), is_first=True)

    def pool(self, submit: Submit) -> None:
        """Send the vector of a prompt: its number of tokens or characters, 1, 2 and 2."""
        prompt = submit.prompt
        size = len(prompt.text) if isinstance(prompt, TextPrompt) else 3
        if isinstance(prompt, TokenPrompt):
            size = len(prompt.token_ids) // 4
        self.live.pop(submit.request_id)
        vector = array("f", [size, 1, 2, 2]).tobytes()
        self.deliver(Pooled(submit.request_id, size, 1 if submit.spec.cache_salt else 0, 0, vector))

    def piece(self, submit: Submit, index: int) -> str:
        """Return the text of token ``index``."""
        entries = self.script[index : index + 1] if submit.spec.parsing is not None else []
        return "".join(text for _, _, text in entries[0]) if entries else f" t{index}"

    def step(self, submit: Submit, index: int, offset: int, is_first: bool = False) -> None:
        """Send token ``index`` of every choice, after ``offset`` characters."""
        if submit.request_id not in self.live or self.silent_after == index:
            return
        if self.fail_after == index:
            del self.live[submit.request_id]
            self.deliver(Failed(submit.request_id, self.fails_with, "The engine broke."))
            return
        params = submit.spec.params
        ids = [submit.request_id + c for c in range(params.n)]
        prompt_text = submit.prompt.text if isinstance(submit.prompt, TextPrompt) else " t1 t2"
        prompt_ids = (
            list(unpack_i32(submit.prompt.token_ids))
            if isinstance(submit.prompt, TokenPrompt)
            else list(range(1, 1 + max(1, len(prompt_text.split()))))
        )
        base = len(prompt_text) if submit.spec.echo else 0
        piece = self.piece(submit, index)
        reason, stop = FinishReason.NONE, None
        if any(s in piece for s in params.stop):
            reason, stop, piece = FinishReason.STOP, params.stop[0], ""
        elif index + 1 == (params.max_tokens or 4):
            reason = FinishReason.LENGTH
        entries = self.script[index : index + 1] if submit.spec.parsing is not None else []
        if entries and index + 1 == len(self.script):
            reason = FinishReason.STOP
        elif entries and index + 1 != params.max_tokens:
            reason = FinishReason.NONE
        spans = [(channel, call, len(text)) for channel, call, text in entries[0]] if entries else []
        channels = [channel for token in self.script for channel, _, _ in token]
        started = []
        if is_first:
            prompt_logprobs = None
            first_token = Alternative(prompt_ids[0], 0.0, "<first>", b"<first>", 0)
            if params.prompt_logprobs is not None:
                width = len(prompt_text) // len(prompt_ids)
                prompt_logprobs = [None] + [
                    position(p, params.prompt_logprobs, i * width) for i, p in enumerate(prompt_ids) if i
                ]
            started = [
                Started(
                    rid,
                    len(prompt_ids),
                    1 if submit.spec.cache_salt else 0,
                    submit.spec.arrival_ns,
                    submit.spec.arrival_ns,
                    pack_i32(prompt_ids) if submit.spec.return_prompt_ids else b"",
                    prompt_text if submit.spec.echo else None,
                    prompt_logprobs,
                    first_token if prompt_logprobs and submit.spec.echo else None,
                )
                for rid in ids
            ]
        logprobs = []
        if params.logprobs is not None:
            num_top = max(params.logprobs, len(params.logprob_token_ids or ()))
            logprobs = [
                RowLogprobs(row, [position(10 + index, num_top, base + offset)]) for row in range(params.n)
            ]
        self.deliver(
            Text(
                step=index,
                sent_ns=submit.spec.arrival_ns,
                tokens_sent_ns=submit.spec.arrival_ns,
                started=started,
                request_ids=ids,
                deltas=[piece] * params.n,
                offsets=[offset] * params.n,
                first_indexes=[index] * params.n,
                num_tokens=[1] * params.n,
                token_ids=pack_i32([10 + index] * params.n),
                finishes=[
                    Finish(
                        rid,
                        reason,
                        stop,
                        index + 1,
                        channels.count(Channel.REASONING),
                        channels.count(Channel.NAME),
                        self.drafts,
                    )
                    for rid in ids
                ]
                if reason
                else [],
                logprobs=logprobs,
                spans=[RowSpans(row, spans) for row in range(params.n)] if spans else [],
            )
        )
        if reason:
            with self.arrived:
                self.live.pop(submit.request_id, None)
                self.arrived.notify_all()
        else:
            asyncio.get_running_loop().call_soon(self.step, submit, index + 1, offset + len(piece))

    def abort(self, cancel: Cancel) -> None:
        if self.live.pop(cancel.request_ids[0], None) is not None:
            finishes = [Finish(rid, FinishReason.ABORT, None, 0) for rid in cancel.request_ids]
            self.deliver(Text(0, 0, 0, [], [], [], [], [], [], b"", finishes))

    def release(self) -> None:
        self.held = False
        for submit in list(self.live.values()):
            self.begin(submit)

    def wait_for_idle(self) -> None:
        """Return once no request is live."""
        self.wait_for(Submit)
        with self.arrived:
            assert self.arrived.wait_for(lambda: not self.live, DEADLINE_S), "still busy"

    def wait_for(self, kind: type[msgspec.Struct], count: int = 1) -> list[Any]:
        """Return the messages of a kind once there are ``count`` of them."""

        def found() -> list[Any]:
            return [m for _, _, m in self.sent if isinstance(m, kind)]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(found()) >= count, DEADLINE_S), f"no {kind.__name__}"
            return found()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON documents of an SSE body."""
        lines = [
            line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line.startswith(b"data: ")
        ]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def event_ids(self) -> list[str]:
        """The ids of the events of an SSE body."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"id: ")]
        return [line.removeprefix(b"id: ").decode() for line in lines]


class Server:
    """The application under uvicorn, in its own thread."""

    kinds = messages
    """Module of the types of messages sent to the engine."""

    def __init__(self, config: EngineConfig, states: dict[str, SlotState]) -> None:
        self.engine = FakeEngine()
        self.states = states
        self.config = config
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.service = Service(WorkerId(Role.FRONTEND, 0, 1), self.engine.send, self.config, Metrics())
            self.engine.service = self.service
            self.service.handle(topology(1, **self.states))
            self._server = make_server(FrontendApp(self.service), self.config.frontend)
            self.loop.call_soon(self._ready.set)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[self.listener]))
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving

        uvloop.run(serve())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on the server's loop."""

        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE_S)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """Send one request over a new connection. ``body`` is bytes or a JSON value."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            sent = {"content-type": "application/json"} if body is not None else {}
            connection.request(method, path, body, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def stop(self) -> None:
        """Close all connections immediately: uvicorn's own shutdown polls every 0.1 s."""

        def exit_now() -> None:
            for server in self._server.servers:
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.shutdown()
            self.loop.call_soon(self._serving.cancel)

        if not self._serving.done():  # a test may have stopped it already
            self.call(exit_now)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers with the given frontend settings. ``states`` lists the slots that are not ready."""
    servers: list[Server] = []

    def start(states: dict[str, SlotState] | None = None, **frontend: Any) -> Server:
        servers.append(Server(make_config(**{"run_dir": str(tmp_path), **frontend}), states or {}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for tests without side effects."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = Server(make_config(str(tmp_path_factory.mktemp("run")), policy="priority"), {})
    yield server
    server.stop()


@pytest.fixture
def client(shared: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(name="topology")
def topology_fixture() -> Callable[..., Topology]:
    """Build topologies with one slot of each role, all ready except those in ``states``."""
    return topology
