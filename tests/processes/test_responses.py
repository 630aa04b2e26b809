"""Responses API of a real server with the `openai` package, and `kill -9` during a stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI, OpenAIError
from openai.types.responses import Response
from pydantic import BaseModel

from quintet.wire.ids import frontend_of
from tests.processes.server import Server, serve, wait_until

ASK: dict[str, Any] = {
    "instructions": "You know Python.",
    "input": [{"role": "user", "content": "Write a parser of numbers."}],
    "max_output_tokens": 60,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


FLAGS = (
    "--kv-cache-memory 32MiB --max-model-len 512 --frontends 2 --max-restarts 100 --tool-call-parser hermes"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kept.sqlite"


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with serve(*FLAGS.split(), "--response-store", str(store)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client: OpenAI) -> dict[str, Any]:
    return {**ASK, "model": client.models.list().data[0].id}


@pytest.fixture(scope="module")
def whole(client: OpenAI, ask: dict[str, Any]) -> Response:
    response: Response = client.responses.create(**ask)
    return response


def test_streamed_response_equals_the_whole_one(client: OpenAI, ask: dict[str, Any], whole: Response) -> None:
    assert whole.output_text.strip() and whole.status in ("completed", "incomplete")
    events = list(client.responses.create(**ask, stream=True))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text and last.response.usage is not None
    assert whole.usage is not None and last.response.usage.output_tokens == whole.usage.output_tokens
    assert last.response.usage.input_tokens_details.cached_tokens > 0


def test_text_format_and_tool_arguments_match_their_schemas(client: OpenAI, ask: dict[str, Any]) -> None:
    class Point(BaseModel):
        x: bool
        y: bool

    fields = {**ask, "max_output_tokens": 200, "extra_body": {}}
    parsed = client.responses.parse(**fields, text_format=Point)
    assert isinstance(parsed.output_parsed, Point)
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool: Any = {"type": "function", "name": "light", "parameters": schema, "strict": True}
    conversation: list[Any] = list(ask["input"])
    for _ in range(2):
        fields |= {
            "input": conversation,
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        response = client.responses.create(**fields)
        (call,) = response.output
        assert call.type == "function_call" and isinstance(json.loads(call.arguments)["on"], bool)
        conversation += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]


class Reader:
    """Client of a stream of events."""

    def __init__(self, server: Server) -> None:
        url = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
        self._response: http.client.HTTPResponse | None = None
        self.last_id = self.stream = ""
        self.events: list[Any] = []

    @property
    def num_deltas(self) -> int:
        """Number of text deltas so far."""
        return sum(event["type"] == "response.output_text.delta" for event in self.events)

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def open(self, method: str, path: str, body: object = None) -> None:
        """Start or resume a stream."""
        headers = {"content-type": "application/json"}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        self.close()
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.stream = str(self._response.getheader("x-stream-id"))

    def read(self, num_deltas: int = 1 << 30) -> bool:
        """Read up to `num_deltas` text deltas; return True at the end of the stream."""
        assert self._response is not None
        while self.num_deltas < num_deltas:
            try:
                line = self._response.readline().decode()
            except (OSError, http.client.HTTPException):
                return False
            if line.startswith("id: "):
                self.last_id = line.strip().removeprefix("id: ")
            elif line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
            if (
                self.events
                and "usage" in self.events[-1].get("response", {})
                and self.events[-1]["response"]["usage"]
            ):
                return True
            if not line:
                return False
        return False


@pytest.mark.whole
@pytest.mark.parametrize("role", ["frontend", "core"])
def test_kill_during_a_stream_keeps_the_response(
    server: Server, client: OpenAI, ask: dict[str, Any], whole: Response, role: str
) -> None:
    """Loss of a core is invisible to clients; after loss of a frontend the client resumes at another."""
    body = {**ask, **ask["extra_body"], "stream": True}
    with contextlib.closing(Reader(server)) as reader:
        reader.open("POST", "/v1/responses", body)
        assert not reader.read(5)
        index, _ = frontend_of(int(reader.stream.partition("-")[0], 16)) if role == "frontend" else (0, 0)
        wait_until(lambda: f"quintet-{role}-{index}" in server.children(), role)
        server.children()[f"quintet-{role}-{index}"].kill()
        if not reader.read():
            assert role == "frontend"
            reader.open("GET", f"/v1/streams/{reader.last_id.partition(':')[0]}")
            if not reader.read(reader.num_deltas + 1):  # False if the kill was after the last text
                reader.open("POST", "/v1/responses", body)  # reconnects and resends the request
                assert reader.read()
    assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
    deltas = [event["delta"] for event in reader.events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    (message,) = reader.events[-1]["response"]["output"]
    assert message["content"][0]["text"] == whole.output_text
    kept = client.responses.retrieve(reader.events[0]["response"]["id"])
    assert kept.status == whole.status and kept.output_text == whole.output_text


def ended(client: OpenAI, response_id: str) -> Response:
    """Return a response once it has ended."""
    found: list[Response] = []

    def has_ended() -> bool:
        found[:] = [client.responses.retrieve(response_id)]
        return found[0].status not in ("queued", "in_progress")

    wait_until(has_ended, response_id)
    return found[0]


def stored_state(store: Path, response_id: str) -> tuple[str, str]:
    """Return owner and status of a response."""
    with contextlib.closing(sqlite3.connect(store)) as file:
        rows = file.execute("SELECT owner, status FROM responses WHERE id = ?", (response_id,)).fetchall()
    return rows[0][0], rows[0][1]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("roles", [("frontend",), ("core",), ("frontend", "core")])
def test_kill_keeps_background_responses(
    server: Server, client: OpenAI, ask: dict[str, Any], store: Path, roles: tuple[str, ...]
) -> None:
    """Another frontend completes the response, and its stream resumes after the events already read."""
    ask = {**ask, "max_output_tokens": 400}
    plain = client.responses.create(**ask, background=True)
    first: list[Any] = []
    try:
        with client.responses.create(**ask, background=True, stream=True) as stream:
            for event in stream:
                first.append(event)
                if len(first) == 10:
                    response_id = first[0].response.id
                    slot = stored_state(store, response_id)[0].rpartition("/")[2].partition(".")[0]
                    children = server.children()
                    children["quintet-executor-0"].suspend()  # keeps the response unfinished until the kills
                    for role in roles:
                        children[f"quintet-{role}-{slot if role == 'frontend' else 0}"].kill()
                    break
    except OpenAIError:
        assert "frontend" in roles
    assert stored_state(store, response_id)[1] == "in_progress"
    server.children()["quintet-executor-0"].resume()
    last = ended(client, response_id)
    assert last.usage is not None and last.usage.output_tokens == 400
    assert (
        last.output_text == ended(client, plain.id).output_text == client.responses.create(**ask).output_text
    )
    after = first[-1].sequence_number
    events = [*first, *client.responses.retrieve(response_id, stream=True, starting_after=after)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.output_text
    assert events[-1].response == last


def test_response_store_has_one_server(server: Server, store: Path) -> None:
    """A second server exits with a one-line error; the first continues to serve."""
    command = [sys.executable, "-m", "quintet", "serve", "--executor", "mock", "--port", "0"]
    second = subprocess.run(
        [*command, "--response-store", str(store)], check=False, capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 78
    assert f"--response-store {store} is in use by another running server" in second.stderr.splitlines()[-1]
    assert server.get("/health")[0] == 200


@pytest.mark.whole
def test_responses_survive_a_server_restart(ask: dict[str, Any], tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--response-store", str(tmp_path / "kept.sqlite")]
    with serve(*flags) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        first = client.responses.create(**ask)
    with serve(*flags) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(**{**ask, "input": "And then?"}, previous_response_id=first.id)
        kinds = [item.type for item in client.responses.input_items.list(second.id)]
        assert kinds == ["message"] * 3
        cut_off = client.responses.create(**{**ask, "max_output_tokens": 400}, background=True)
        server.process.kill()
        server.process.wait()
    with serve(*flags) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        last = ended(client, cut_off.id)
        assert last.output_text == client.responses.create(**{**ask, "max_output_tokens": 400}).output_text
