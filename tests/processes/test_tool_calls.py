"""Reasoning and tool calls through real processes: whole, streamed, and with a kill of each role.

The mock executor draws by seed and position only. The test's tokenizer maps the ids that it will draw to the text `WRITTEN`.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quintet.detokenizer_proc.vocabulary import byte_alphabet
from quintet.executor.mock import MockWorker
from tests.deploy.config.model_folder import write_model

from .server import Server, serve

H, M = "/v1/chat/completions", "/v1/messages"
VOCAB_SIZE, SEED = 16384, 7
PROMPT = "?!"
TEMPLATE = "{# <think></think> <tool_call> name arguments #}" + PROMPT
ARGUMENTS = {"city": "Zürich", "days": [1, 2, 3], "note": 'say "rain" or \\ {not}'}
WRITTEN = (
    "<think>\nThe user asks about the weather, so there is a tool for that.\n</think>\n\nLet me look at it. 🌧\n"
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>\n"
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
END = "|stop|"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get_weather", "get_time")
]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "rain?"}],
    "tools": TOOLS,
    "seed": SEED,
    "stop": [END],
    "max_tokens": 400,
}
CALLS = [("get_weather", ARGUMENTS), ("get_time", {})]
MESSAGES: dict[str, Any] = {
    "messages": BODY["messages"],
    "tools": [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS],
    "stop_sequences": [END],
    "max_tokens": 400,
}
"""The same request in Anthropic's API."""


def chunks_of(text: str) -> list[str]:
    """Split a text into distinct parts of at least two characters."""
    found: list[str] = []
    while text:
        size = next(size for size in range(2, len(text) + 2) if text[:size] not in found)
        found.append(text[:size])
        text = text[size:]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder with a tokenizer that decodes the mock's draws to `WRITTEN` and `END`."""
    chunks = [*chunks_of(WRITTEN), END]
    worker = MockWorker(1, VOCAB_SIZE, [2], 1, 0.0)
    ends = np.arange(len(PROMPT), len(PROMPT) + len(chunks), dtype=np.int32)
    drawn = worker._draw(np.full(len(chunks), SEED, np.uint64), ends).tolist()
    assert len(set(drawn)) == len(drawn), "the seed draws an id twice; choose another"
    spelled = {byte: letter for letter, byte in byte_alphabet().items()}
    vocab = {letter: byte for byte, letter in spelled.items()}
    written = dict(zip(drawn, chunks, strict=True))
    for token_id in range(256, VOCAB_SIZE):
        text = written.get(token_id, f"<{token_id}>")
        vocab["".join(spelled[byte] for byte in text.encode())] = token_id
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = write_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = (
        "--executor",
        "mock",
        "--step-ms",
        "8",
        "--frontends",
        "1",
        "--max-restarts",
        "1000",
        "--enable-auto-tool-choice",
    )
    with serve(str(model), *flags) as server:
        yield server
        assert server.stop() == 0


def test_parsers_chosen_by_the_template_are_logged(server: Server) -> None:
    notes = [line for line in server.lines if "--tool-call-parser hermes" in line]
    assert len(notes) == 1 and "--reasoning-parser qwen3" in notes[0]


def fields_of(message: Any) -> dict[str, Any]:
    return {
        "reasoning": message["reasoning"],
        "content": message["content"],
        "calls": [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message["tool_calls"]
        ],
    }


def test_whole_answer_has_reasoning_and_calls(server: Server) -> None:
    status, answer = server.post(H, BODY)
    assert status == 200
    (choice,) = answer["choices"]
    assert fields_of(choice["message"]) == {
        "reasoning": "The user asks about the weather, so there is a tool for that.",
        "content": "Let me look at it. 🌧",
        "calls": CALLS,
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", END)
    num_reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 10 < num_reasoning < answer["usage"]["completion_tokens"] / 2


def test_tool_results_are_accepted_in_the_next_turn(server: Server) -> None:
    """The openai package sends the response back with the tools' results."""
    client = OpenAI(base_url=server.url + "/v1", api_key="x")
    arguments: dict[str, Any] = {**BODY, "model": client.models.list().data[0].id}
    first = client.chat.completions.create(**arguments).choices[0].message
    assert first.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in first.tool_calls]
    arguments["messages"] = [*BODY["messages"], first.model_dump(exclude_none=True), *results]
    assert client.chat.completions.create(**arguments).choices[0].finish_reason == "tool_calls"


STREAMED = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


class StreamClient:
    """Client that reads a stream to its end and reconnects after errors."""

    def __init__(self, server: Server, path: str = H, body: dict[str, Any] = STREAMED) -> None:
        self._server = server
        self._path = path
        self._body = json.dumps(body)
        self._last_id = ""
        self.reasoning = self.content = ""
        self.names: dict[int, str] = {}
        self.ids: dict[int, str] = {}
        self.arguments: dict[int, str] = {}
        self.finish_reason: str | None = None
        self.usage: Any = None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events; after a lost connection, resume after the last event id."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            connection = http.client.HTTPConnection(urlsplit(self._server.url).netloc, timeout=30)
            try:
                headers = {"Content-Type": "application/json", "User-Agent": "tests"}
                headers |= {"Last-Event-ID": self._last_id} if self._last_id else {}
                connection.request("POST", self._path, self._body, headers)
                for line in connection.getresponse():
                    if line.startswith(b"id: "):
                        self._last_id = line[4:].strip().decode()
                    elif line == b"data: [DONE]\n":
                        return
                    elif line.startswith(b"data: "):
                        yield json.loads(line[6:])
                        if b"message_stop" in line:
                            return
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)  # the frontend that was killed is being replaced
            finally:
                connection.close()
        raise AssertionError("the stream did not end")

    def add(self, event: dict[str, Any]) -> None:
        """Add one event."""
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.reasoning += delta.get("reasoning") or ""
            self.content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                index, function = call["index"], call["function"]
                if "name" in function:
                    assert index not in self.names
                    self.names[index], self.ids[index] = function["name"], call["id"]
                self.arguments[index] = self.arguments.get(index, "") + function["arguments"]

    def summary(self) -> tuple[Any, ...]:
        """Return all fields except ids, which differ between requests."""
        return self.reasoning, self.content, self.names, self.arguments, self.finish_reason, self.usage


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> tuple[Any, ...]:
    stream_client = StreamClient(server)
    for event in stream_client.events():
        stream_client.add(event)
    return stream_client.summary()


def test_streamed_answer_equals_the_whole_one(server: Server, undisturbed: tuple[Any, ...]) -> None:
    _, answer = server.post(H, BODY)
    message = answer["choices"][0]["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert undisturbed == (
        message["reasoning"],
        message["content"],
        {index: function["name"] for index, function in enumerate(functions)},
        {index: function["arguments"] for index, function in enumerate(functions)},
        "tool_calls",
        answer["usage"],
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize("role", ["detokenizer", "core", "executor", "frontend"])
@pytest.mark.parametrize("moment", ["thinking", "calling"])
def test_kill_keeps_the_streamed_answer(
    server: Server, undisturbed: tuple[Any, ...], role: str, moment: str
) -> None:
    stream_client = StreamClient(server)
    is_due = True
    for event in stream_client.events():
        stream_client.add(event)
        received = stream_client.reasoning if moment == "thinking" else stream_client.arguments.get(0)
        if is_due and received:
            is_due = False
            server.children()[f"quintet-{role}-0"].kill()
    assert not is_due
    assert stream_client.summary() == undisturbed
    assert len(set(stream_client.ids.values())) == 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["detokenizer", "core", "frontend"])
def test_kill_keeps_the_events_of_the_anthropic_api(server: Server, role: str) -> None:
    """Each event is sent once and in order; the text equals that of the anthropic package."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="x") as client:
        model = client.models.list().data[0].id
        whole = client.messages.create(**MESSAGES, model=model, extra_body={"seed": SEED})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in whole.content if block.type == "tool_use"] == CALLS
    assert whole.stop_reason == "tool_use"
    stream_client = StreamClient(server, M, {**MESSAGES, "seed": SEED, "stream": True})
    blocks: list[str] = []
    order: list[str] = []
    is_due = True
    for event in stream_client.events():
        match event:
            case {"type": "ping"}:
                continue
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block.get("name", ""))
            case {"type": "content_block_delta", "delta": {"type": kind, **new}}:
                blocks[-1] += "" if kind == "signature_delta" else "".join(new.values())
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                assert reason == whole.stop_reason
        if order[-1:] != [event["type"]]:
            order.append(event["type"])
        if is_due and len(blocks) == 3 and len(blocks[-1]) > len("get_weather"):
            is_due = False
            server.children()[f"quintet-{role}-0"].kill()
    assert not is_due
    in_a_block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *in_a_block * 4, "message_delta", "message_stop"]
    texts = [*(block.thinking if block.type == "thinking" else block.text for block in whole.content[:2])]  # type: ignore[union-attr]
    written = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert blocks == [*texts, "get_weather" + written, "get_time{}"]
