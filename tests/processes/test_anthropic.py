"""Anthropic API of a real server with the `anthropic` package, and `kill -9` during a stream."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest

from quintet.wire.ids import frontend_of
from tests.processes.server import Server, serve, wait_until

if TYPE_CHECKING:
    import anthropic  # slow import: not during collection

ASK: dict[str, Any] = {
    "max_tokens": 60,
    "system": [{"type": "text", "text": "You know Python.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Write a parser of numbers."},
        {"role": "assistant", "content": "import re\n\nclass Parser:"},
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = "--kv-cache-memory 32MiB --max-model-len 512 --frontends 2 --max-restarts 100"
    tools = "--enable-auto-tool-choice --tool-call-parser hermes"
    with serve(*flags.split(), *tools.split()) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(server: Server) -> dict[str, Any]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        (model,) = client.models.list()
    assert model.type == "model" and model.display_name == model.id and model.created_at
    return {**ASK, "model": model.id, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def whole(server: Server, ask: dict[str, Any]) -> anthropic.types.Message:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        message: anthropic.types.Message = client.messages.create(**ask)
    return message


def test_streamed_message_equals_the_whole_one(
    client: anthropic.Anthropic, ask: dict[str, Any], whole: anthropic.types.Message
) -> None:
    assert whole.content[0].type == "text" and whole.content[0].text.strip()
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert [block.model_dump() for block in streamed.content] == [
        block.model_dump() for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(**{name: ask[name] for name in ("model", "system", "messages")})
    for message in (whole, streamed):
        cached = message.usage.cache_read_input_tokens or 0
        assert message.usage.input_tokens + cached == counted.input_tokens
    assert streamed.usage.cache_read_input_tokens


def test_errors_are_those_of_the_anthropic_package(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    import anthropic

    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(
        anthropic.APIStatusError, match=r"messages\[0\].content\[0\].image was sent"
    ) as refused:
        client.messages.create(**{**ask, "messages": [{"role": "user", "content": [image]}]})
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ask, "model": "unknown"})
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        client.messages.create(**{**ask, "messages": long})
    cut: Any = {**ask, "max_tokens": 100_000, "messages": [{"role": "user", "content": "word " * 150}]}
    answer = client.messages.create(**cut, timeout=60)
    assert answer.stop_reason in ("end_turn", "model_context_window_exceeded")


def test_tool_runner_arguments_match_the_schema(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    """The package runs the tool for each call and sends the results."""
    import anthropic

    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"], unit: Literal["C", "F"]) -> str:
        """Return the weather of a city.

        Args:
            city: name of the city
            unit: unit of the temperature
        """
        assert unit in ("C", "F")
        cities.append(city)
        return "12"

    turns = client.beta.messages.tool_runner(
        model=ask["model"],
        max_tokens=120,
        messages=[{"role": "user", "content": "Is it cold in Rome?"}],
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body={"seed": 1},
    )
    answers = list(turns)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert len(cities) == 2
    last = client.messages.create(
        model=ask["model"], max_tokens=8, messages=[{"role": "user", "content": "Is it?"}],
        tools=[weather.to_dict()], tool_choice={"type": "none"},
    )  # fmt: skip
    assert all(block.type == "text" for block in last.content)


class Reader:
    """Client of a stream that assembles the message from its events."""

    def __init__(self, server: Server) -> None:
        url = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
        self._response: http.client.HTTPResponse | None = None
        self.stream = self.last_id = ""
        self.names: list[str] = []
        self.texts: list[str] = []
        self.stop_reason = ""

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def open(self, method: str, path: str, body: object = None) -> None:
        """Start or resume a stream."""
        sent = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json"}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        self.close()
        self._connection.request(method, path, sent, headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.stream = str(self._response.getheader("x-stream-id"))

    def read(self, num_deltas: int = 1 << 30) -> bool:
        """Read up to `num_deltas` text deltas; return True at the end of the stream."""
        assert self._response is not None
        while len(self.texts) < num_deltas:
            try:
                line = self._response.readline().decode().strip()
            except (OSError, http.client.HTTPException):
                return False
            if line.startswith("id: "):
                self.last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
            elif not line and self._response.isclosed():
                return self.names[-1] == "message_stop"
            if self.names[-1:] == ["message_stop"]:
                return True
        return False

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "ping":
            return
        assert event["type"] != "error", event
        self.names.append(event["type"])
        if event["type"] == "content_block_delta":
            self.texts.append(event["delta"]["text"])
        elif event["type"] == "message_delta":
            self.stop_reason = event["delta"]["stop_reason"]


@pytest.fixture
def reader(server: Server) -> Iterator[Reader]:
    with closing(Reader(server)) as reader:
        yield reader


@pytest.mark.parametrize("role", ["frontend", "core"])
def test_kill_during_a_stream_keeps_the_message(
    server: Server, ask: dict[str, Any], whole: anthropic.types.Message, role: str, reader: Reader
) -> None:
    """Loss of a core is invisible to clients; after loss of a frontend the client resumes at another."""
    body = {name: value for name, value in ask.items() if name != "extra_body"} | {
        "stream": True,
        "temperature": 0,
    }
    reader.open("POST", "/v1/messages", body)
    assert not reader.read(5)
    index, _ = frontend_of(int(reader.stream.partition("-")[0], 16)) if role == "frontend" else (0, 0)
    wait_until(lambda: f"quintet-{role}-{index}" in server.children(), role)
    server.children()[f"quintet-{role}-{index}"].kill()
    if not reader.read():
        assert role == "frontend"
        reader.open("GET", f"/v1/streams/{reader.last_id.partition(':')[0]}")
        if not reader.read(len(reader.texts) + 1):  # the rest may be one event
            reader.open("POST", "/v1/messages", body)  # reconnects and resends the request, as browsers do
            assert reader.read()
    expected = whole.content[0]
    assert expected.type == "text" and "".join(reader.texts) == expected.text
    assert reader.stop_reason == whole.stop_reason
    before, after = (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )
    assert reader.names == [*before, *["content_block_delta"] * len(reader.texts), *after]
