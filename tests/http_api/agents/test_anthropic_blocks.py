"""Content blocks in Anthropic's dialect: thinking, text and tool calls; streams resume after any event."""

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
from quintet.frontend.resume.stream_state import StreamCursor, StreamId
from quintet.frontend.streams import Batch, OutputDelta
from quintet.wire.channels import Channel
from quintet.wire.chat import decode_messages
from quintet.wire.config import ParsersConfig, ThinkMarks
from quintet.wire.errors import RequestError
from quintet.wire.messages import Finish, FinishReason, Started, Submit
from quintet.wire.request import OutputParsing

if TYPE_CHECKING:
    import anthropic  # thousands of files: not imported when tests are collected

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


def blocks_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Return the blocks without their ids."""
    blocks = [
        block.model_dump(exclude_none=True, exclude={"id", "signature", "caller"})
        for block in message.content
    ]
    assert all(block.signature for block in message.content if block.type == "thinking")
    ids = [block.id for block in message.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    return blocks


def test_whole_and_streamed_answers_are_equal(client: anthropic.Anthropic, server: Any) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert blocks_of(message) == [
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


def test_parallel_calls_and_thinking_can_be_disabled(client: anthropic.Anthropic, server: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = client.messages.create(**{**ASK, "tool_choice": choice})
    with client.messages.stream(**{**ASK, "tool_choice": choice}) as stream:
        streamed = stream.get_final_message()
    assert blocks_of(whole) == blocks_of(streamed)
    assert [block.name for block in whole.content if block.type == "tool_use"] == ["rain"]
    client.messages.create(**{**ASK, "tool_choice": {"type": "none"}})
    assert server.engine.wait_for(Submit)[-1].spec.parsing == OutputParsing("qwen3")


def test_a_budget_for_thinking_is_passed_on(client: anthropic.Anthropic, server: Any) -> None:
    client.messages.create(
        **{**ASK, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    )
    assert server.engine.wait_for(Submit)[-1].spec.params.thinking_token_budget == 1024


def test_a_truncated_call_is_not_a_block_of_a_whole_answer(client: anthropic.Anthropic, server: Any) -> None:
    whole: Token = [(NAME, 0, "rain"), (ARGUMENTS, 0, '{"in": "Oslo"}'), (NAME, 1, "now")]
    server.engine.script = [whole, [(ARGUMENTS, 1, '{"at": "')], [(ARGUMENTS, 1, 'x"}')]]
    for max_tokens in (1, 2):
        message = client.messages.create(**{**ASK, "max_tokens": max_tokens})
        assert blocks_of(message) == [{"type": "tool_use", "name": "rain", "input": {"in": "Oslo"}}]
        assert message.stop_reason == "max_tokens"


def test_arguments_that_are_not_json_are_passed_through(client: anthropic.Anthropic, server: Any) -> None:
    server.engine.script = [[(NAME, 0, "rain"), (ARGUMENTS, 0, '{"in": "Os')]]
    (block,) = client.messages.create(**ASK).content
    assert block.type == "tool_use" and block.input == {UNREADABLE_INPUT: '{"in": "Os'}


def test_an_agent_loop_completes(client: anthropic.Anthropic, server: Any) -> None:
    """The client returns the answer's blocks unchanged, with the results."""
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
    assert blocks_of(last) == [{"type": "text", "text": "Yes."}] and last.stop_reason == "end_turn"
    sent = decode_messages(server.engine.wait_for(Submit)[-1].prompt.messages)
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["reasoning_content"] == "Rain?" and len(sent[1]["tool_calls"]) == 2
    assert [call["id"] for call in sent[1]["tool_calls"]] == [message["tool_call_id"] for message in sent[2:]]


# --- resumed streams ----------------------------------------------------------------------------------------------

STREAM = StreamId(7, b"k" * 16)


def events(
    tokens: list[Token], before: int, position: StreamCursor | None, draw: random.Random, parallel: bool
) -> list[bytes]:
    """Return the events of an answer after its first ``before`` tokens. A step has 1 to 3 tokens, drawn at random."""
    answer = MessagesAnswer(1, 1, 1, "1", "toy", 50, Channels("1", parallel_calls=parallel))
    writer = MessagesWriter(answer, STREAM, position)
    started = Started(7, 2, 0, 0, 0)
    stream: Any = SimpleNamespace(choices=[SimpleNamespace(num_taken=before)], started=started)
    frames: list[bytes] = []
    if position is None or position.counts[0] is None:
        writer.write(frames, 0, stream, Batch(started, []))
    has_ended = position is not None and position.ended[0]
    at = before
    while at < len(tokens) or not has_ended:
        end = min(len(tokens), at + draw.randint(1, 3))
        new = [piece for token in tokens[at:end] for piece in token]
        at = stream.choices[0].num_taken = end
        has_ended = end == len(tokens)
        finish = Finish(7, FinishReason.STOP, None, end, 2, 2) if has_ended else None
        spans = [(channel, call, len(text)) for channel, call, text in new]
        delta = OutputDelta(0, "".join(text for _, _, text in new), [0], [], finish, spans)
        writer.write(frames, 0, stream, Batch(None, [delta]))
    return [*frames, writer.tail([])]


def assembled(frames: list[bytes]) -> list[Any]:
    """Assemble a message as a client does, which relies on the order of events."""
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
def test_a_stream_resumes_after_any_event(parallel: bool) -> None:
    """For any grouping of tokens into steps, before and after each resumption."""
    draw = random.Random(5)
    expected = assembled(events(SCRIPT, 0, None, draw, parallel))
    for _ in range(30):
        received: list[bytes] = []
        position = None
        while not received or b"message_stop" not in received[-1]:
            before = 0 if position is None else position.counts[0] or 0
            rest = events(SCRIPT, before, position, draw, parallel)
            received += rest[: draw.randint(1, len(rest))]
            if received[-1].startswith(b"event: ping"):
                received.pop()
            named = next(
                line for line in reversed(b"".join(received).splitlines()) if line.startswith(b"id: ")
            )
            position = StreamCursor.parse(named.decode().partition(":")[2].partition(":")[2], 1)
        assert assembled(received) == expected


def test_a_stream_resumes_at_another_server(server: Any) -> None:
    """Resume like the router, with the token ids of the comments."""
    request, named = {**ASK, "stream": True, "seed": 5}, {"X-Request-Id": "r1", "X-Quintet-Relay": "1"}
    reply = server.ask("POST", "/v1/messages", request, named)
    assert reply.headers["x-quintet-relay"] == "5.0"
    frames = [frame for frame in reply.body.split(b"\n\n") if frame and not frame.startswith(b"event: ping")]
    whole = assembled(frames)
    for cut in range(1, len(frames)):
        before = b"\n\n".join(frames[:cut])
        ids = [json.loads(note) for note in re.findall(rb"^: ids 0 (\[.*\])$", before, re.M)]
        resume_body = {
            "path": "/v1/messages",
            "request": request,
            "position": re.findall(rb"^id: .*:(.*)$", before, re.M)[-1].decode(),
            "outputs": [[token for each in ids for token in each]],
            "seeds": [5],
            "created": 0,
        }
        rest = server.ask("POST", "/v1/streams", resume_body, named)
        assert rest.status == 200, rest.body
        assert assembled([*frames[:cut], *rest.body.split(b"\n\n")[:-1]]) == whole
    assert all(submit.spec.params.seed == 5 for submit in server.engine.wait_for(Submit))
    server.engine.fail_after = 2
    broken = server.ask("POST", "/v1/streams", {**resume_body, "position": "1.1r", "outputs": [[10]]}, named)
    assert b'event: error\ndata: {"type":"error"' in broken.body


@pytest.mark.parametrize("note", ["u", "1z", "1t+", "t1", "1t+1+1"])
def test_a_cursor_of_another_dialect_is_refused(note: str) -> None:
    with pytest.raises(RequestError, match="position"):
        events(SCRIPT, 0, StreamCursor.parse(f"1.{note}", 1), random.Random(0), True)
