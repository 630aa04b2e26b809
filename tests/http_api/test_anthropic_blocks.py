"""Blocks of an answer in Anthropic's dialect: thinking, text and calls of tools; and that a stream goes on behind any event."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from quintet.frontend.api.anthropic.events import UNREADABLE_INPUT, MessagesAnswer, MessagesWriter
from quintet.frontend.api.channels import Channels
from quintet.frontend.resume.stream_cursor import StreamCursor, StreamId
from quintet.frontend.streams import Batch, Delta
from quintet.wire.channels import Channel
from quintet.wire.config import ParsersConfig, ThinkMarks
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, Started, Submit
from quintet.wire.request import OutputParsing

if TYPE_CHECKING:
    import anthropic  # thousands of files: read by who runs these tests, not by whoever collects them

CONTENT, REASONING, NAME, ARGUMENTS = map(int, Channel)
Token = list[tuple[int, int, str]]
SCRIPT: list[Token] = [
    [(REASONING, 0, "Ra")],
    [(REASONING, 0, "in?")],
    [(CONTENT, 0, "I look."), (NAME, 0, "rain"), (ARGUMENTS, 0, '{"in"')],
    [],
    [(ARGUMENTS, 0, ': "Oslo"}'), (NAME, 1, "now")],
    [(ARGUMENTS, 1, "{}"), (CONTENT, 0, "So"), (CONTENT, 0, ".")],
    [(CONTENT, 0, " Bye")],
    [(CONTENT, 0, "!")],
]
WEATHER = {"name": "rain", "input_schema": {"type": "object"}}
ASK: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "rain?"}],
    "tools": [WEATHER],
}


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    parsers = ParsersConfig(reasoning="qwen3", tools="hermes", thinks=ThinkMarks(["<think>"], ["</think>"]))
    server = serve(parsers=parsers)
    server.engine.script = SCRIPT
    return server


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def said(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Return the blocks without what they are named by."""
    blocks = [
        block.model_dump(exclude_none=True, exclude={"id", "signature", "caller"})
        for block in message.content
    ]
    assert all(block.signature for block in message.content if block.type == "thinking")
    ids = [block.id for block in message.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    return blocks


def test_whole_and_streamed_say_the_same(client: anthropic.Anthropic, server: Any) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert said(message) == [
            {"type": "thinking", "thinking": "Rain?"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "rain", "input": {"in": "Oslo"}},
            {"type": "tool_use", "name": "now", "input": {}},
            {"type": "text", "text": "So. Bye!"},
        ]
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == 2
    assert server.engine.wait_for(Submit)[-1].spec.parsing == OutputParsing("qwen3", "hermes")


def test_a_client_may_want_one_call_alone_or_none(client: anthropic.Anthropic, server: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = client.messages.create(**{**ASK, "tool_choice": choice})
    with client.messages.stream(**{**ASK, "tool_choice": choice}) as stream:
        streamed = stream.get_final_message()
    assert said(whole) == said(streamed)
    assert [block.name for block in whole.content if block.type == "tool_use"] == ["rain"]
    client.messages.create(**{**ASK, "tool_choice": {"type": "none"}})
    assert server.engine.wait_for(Submit)[-1].spec.parsing == OutputParsing("qwen3")


def test_a_budget_for_thinking_is_passed_on(client: anthropic.Anthropic, server: Any) -> None:
    client.messages.create(
        **{**ASK, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    )
    assert server.engine.wait_for(Submit)[-1].spec.params.thinking_token_budget == 1024


def test_a_call_that_was_cut_off_is_no_block_of_a_whole_answer(
    client: anthropic.Anthropic, server: Any
) -> None:
    whole: Token = [(NAME, 0, "rain"), (ARGUMENTS, 0, '{"in": "Oslo"}'), (NAME, 1, "now")]
    server.engine.script = [whole, [(ARGUMENTS, 1, '{"at": "')], [(ARGUMENTS, 1, 'x"}')]]
    for max_tokens in (1, 2):
        message = client.messages.create(**{**ASK, "max_tokens": max_tokens})
        assert said(message) == [{"type": "tool_use", "name": "rain", "input": {"in": "Oslo"}}]
        assert message.stop_reason == "max_tokens"


def test_arguments_that_are_no_json_are_shown_as_they_are(client: anthropic.Anthropic, server: Any) -> None:
    server.engine.script = [[(NAME, 0, "rain"), (ARGUMENTS, 0, '{"in": "Os')]]
    (block,) = client.messages.create(**ASK).content
    assert block.type == "tool_use" and block.input == {UNREADABLE_INPUT: '{"in": "Os'}


def test_a_loop_of_an_agent_ends(client: anthropic.Anthropic, server: Any) -> None:
    """What came back is sent back as it came, with the results."""
    turns: list[Any] = list(ASK["messages"])
    answer = client.messages.create(**ASK)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    server.engine.script = [[(CONTENT, 0, "Yes.")]]
    last = client.messages.create(**{**ASK, "messages": turns})
    assert said(last) == [{"type": "text", "text": "Yes."}] and last.stop_reason == "end_turn"
    sent = json.loads(server.engine.wait_for(Submit)[-1].prompt.messages)
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["reasoning_content"] == "Rain?" and len(sent[1]["tool_calls"]) == 2
    assert [call["id"] for call in sent[1]["tool_calls"]] == [message["tool_call_id"] for message in sent[2:]]


# --- streams that go on -------------------------------------------------------------------------------------------

STREAM = StreamId(7, b"k" * 16)


def events(
    tokens: list[Token], before: int, position: StreamCursor | None, draw: random.Random, parallel: bool
) -> list[bytes]:
    """Return the events of an answer after its first ``before`` tokens, which come several at a time, as it happens."""
    answer = MessagesAnswer(1, 1, 1, "1", "toy", 50, Channels("1", parallel_calls=parallel))
    writer = MessagesWriter(answer, STREAM, position)
    stream: Any = SimpleNamespace(choices=[SimpleNamespace(num_taken=before)])
    frames: list[bytes] = []
    if position is None or position.counts[0] is None:
        writer.write(frames, 0, stream, Batch(Started(7, 2, 0, 0, 0), []))
    has_ended = position is not None and position.ended[0]
    at = before
    while at < len(tokens) or not has_ended:
        end = min(len(tokens), at + draw.randint(1, 3))
        new = [piece for token in tokens[at:end] for piece in token]
        at = stream.choices[0].num_taken = end
        has_ended = end == len(tokens)
        finish = Finish(7, FinishReason.STOP, None, end, 2, 2) if has_ended else None
        spans = [(channel, call, len(text)) for channel, call, text in new]
        delta = Delta(0, "".join(text for _, _, text in new), [0], [], finish, spans)
        writer.write(frames, 0, stream, Batch(None, [delta]))
    return [*frames, writer.tail([])]


def assembled(frames: list[bytes]) -> list[Any]:
    """Put a message together as a client does, which relies on the order of events."""
    found: list[Any] = []
    blocks: list[Any] = []
    is_open = False
    for frame in frames:
        event = json.loads(frame.split(b"data: ")[1])
        match event["type"]:
            case "message_start" | "message_delta" | "message_stop":
                assert not is_open
                found.append(event)
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open = True
                blocks.append([event["content_block"]])
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                kind, text = event["delta"].popitem()
                if len(blocks[-1]) > 1 and blocks[-1][-1][0] == kind:
                    text = blocks[-1].pop()[1] + text
                blocks[-1].append((kind, text))
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
    return [found, blocks]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_stream_goes_on_behind_any_event(parallel: bool) -> None:
    """However the tokens come together before and after, and again in what goes on."""
    draw = random.Random(5)
    expected = assembled(events(SCRIPT, 0, None, draw, parallel))
    for _ in range(30):
        heard: list[bytes] = []
        position = None
        while not heard or b"message_stop" not in heard[-1]:
            before = 0 if position is None else position.counts[0] or 0
            rest = events(SCRIPT, before, position, draw, parallel)
            heard += rest[: draw.randint(1, len(rest))]
            if heard[-1].startswith(b"event: ping"):
                heard.pop()
            named = next(line for line in reversed(b"".join(heard).splitlines()) if line.startswith(b"id: "))
            position = StreamCursor.parse(named.decode().partition(":")[2].partition(":")[2], 1)
        assert assembled(heard) == expected


def test_it_goes_on_at_another_server(server: Any) -> None:
    """As a router has it do that, which has the tokens from comments."""
    asked, named = {**ASK, "stream": True, "seed": 5}, {"X-Request-Id": "r1", "X-Quintet-Relay": "1"}
    told = server.ask("POST", "/v1/messages", asked, named)
    assert told.headers["x-quintet-relay"] == "5.0"
    frames = [frame for frame in told.body.split(b"\n\n") if frame and not frame.startswith(b"event: ping")]
    whole = assembled(frames)
    for cut in range(1, len(frames)):
        before = b"\n\n".join(frames[:cut])
        ids = [json.loads(note) for note in re.findall(rb"^: ids 0 (\[.*\])$", before, re.M)]
        going = {
            "path": "/v1/messages",
            "request": asked,
            "position": re.findall(rb"^id: .*:(.*)$", before, re.M)[-1].decode(),
            "outputs": [[token for each in ids for token in each]],
            "seeds": [5],
            "created": 0,
        }
        rest = server.ask("POST", "/v1/streams", going, named)
        assert rest.status == 200, rest.body
        assert assembled([*frames[:cut], *rest.body.split(b"\n\n")[:-1]]) == whole
    assert all(submit.spec.params.seed == 5 for submit in server.engine.wait_for(Submit))
    server.engine.fail_after = 2
    broken = server.ask("POST", "/v1/streams", {**going, "position": "1.1r", "outputs": [[10]]}, named)
    assert b'event: error\ndata: {"type":"error"' in broken.body


@pytest.mark.parametrize("note", ["u", "1z", "1t+", "t1", "1t+1+1"])
def test_a_position_of_another_dialect_is_refused(note: str) -> None:
    with pytest.raises(RequestError, match="position"):
        events(SCRIPT, 0, StreamCursor.parse(f"1.{note}", 1), random.Random(0), True)
