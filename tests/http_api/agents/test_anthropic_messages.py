"""Anthropic's dialect: prompts, events in order, error shapes and resumable streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from quintet.frontend.api.anthropic.turns import messages_of
from quintet.frontend.api.anthropic.types import ContentBlock, Turn
from quintet.wire.chat import decode_messages
from quintet.wire.errors import RequestError
from quintet.wire.messages import ChatPrompt, Submit

if TYPE_CHECKING:
    import anthropic  # thousands of files: not imported when tests are collected

M, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 4, "messages": HELLO, **fields}


def events_of(answer: bytes) -> list[tuple[str, str, Any]]:
    """Return id, name and data of each event."""
    found = []
    for frame in answer.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


@pytest.fixture
def client(shared: Any) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0) as client:
        yield client


def last_prompt(shared: Any) -> ChatPrompt:
    prompt = shared.engine.wait_for(Submit)[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_whole_answer(shared: Any) -> None:
    reply = shared.ask("POST", M, body(cache_salt="s"), {"x-request-id": "mine"})
    assert reply.status == 200 and reply.headers["request-id"] == "mine"
    assert reply.json == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": " t0 t1 t2 t3"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 4,
        },
    }


def test_a_streamed_answer_has_every_event_in_order(shared: Any) -> None:
    reply = shared.ask("POST", M, body(stream=True, max_tokens=2))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert [name for _, name, _ in events_of(reply.body)] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    datas = [data for _, name, data in events_of(reply.body) if name != "ping"]
    assert all(data["type"] == name for _, name, data in events_of(reply.body))
    start, block, first, second, stop, delta, _ = datas
    assert start["message"]["content"] == [] and start["message"]["usage"]["input_tokens"] == 2
    assert block["content_block"] == {"type": "text", "text": ""} and block["index"] == stop["index"] == 0
    assert [each["delta"]["text"] for each in (first, second)] == [" t0", " t1"]
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"] == {**start["message"]["usage"], "output_tokens": 2}


def test_the_anthropic_package_reads_whole_and_streamed_answers(
    client: anthropic.Anthropic, shared: Any
) -> None:
    ask: Any = {
        "model": "toy",
        "max_tokens": 9,
        "messages": HELLO,
        "stop_sequences": ["3"],
        "extra_body": {"temperature": 0.5},
    }
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == " t0 t1 t2"  # type: ignore[union-attr]
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "3")
        assert message.usage.output_tokens == 4
    params = shared.engine.wait_for(Submit)[-1].spec.params
    assert (params.stop, params.temperature, params.max_tokens) == (["3"], 0.5, 9)
    assert client.messages.count_tokens(model="toy", messages=HELLO).input_tokens == 3  # type: ignore[arg-type]


def test_render_allows_large_max_tokens_and_errors_name_this_dialects_fields(shared: Any) -> None:
    request = body(max_tokens=10**6, stop_sequences=["x"])
    rendered = shared.ask("POST", f"{M}/render", request).json
    assert len(rendered["token_ids"]) + rendered["sampling_params"]["max_tokens"] == 256
    assert rendered["sampling_params"]["stop"] == ["x"]
    refused = shared.ask("POST", f"{M}/render", body(stop_sequences=[""]))
    assert refused.status == 400 and refused.json["error"]["message"].startswith("stop_sequences")


def test_errors_of_sub_paths_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.batches.list()
    assert refused.value.body["type"] == "error"  # type: ignore[index, call-overload]
    assert refused.value.type == "not_found_error" and "/v1/messages/batches" in refused.value.message


def test_a_conversation_with_tools_is_converted_for_the_chat_template(shared: Any) -> None:
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Is it", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": "cold?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "12 °C"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    sent = body(messages=turns, system=system, tools=[WEATHER], tool_choice={"type": "auto"})
    sent |= {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "service_tier": "auto"}
    assert shared.ask("POST", M, sent).status == 200
    prompt = last_prompt(shared)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert decode_messages(prompt.messages) == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Is it\ncold?"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12 °C", "name": "weather"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
    assert json.loads(prompt.tools) == [{"type": "function", "function": function}]
    assert json.loads(prompt.template_kwargs) == {"enable_thinking": False, "thinking": False}
    assert prompt.add_generation_prompt and not prompt.continue_final_message


def test_a_final_assistant_message_is_continued(shared: Any) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert shared.ask("POST", M, body(messages=turns)).status == 200
    prompt = last_prompt(shared)
    assert prompt.continue_final_message and not prompt.add_generation_prompt


def test_a_document_of_text_is_text() -> None:
    source = msgspec.Raw(json.dumps({"type": "text", "media_type": "text/plain", "data": "words"}).encode())
    document = ContentBlock(type="document", title="A title", source=source)
    (message,), places = messages_of(None, [Turn(role="user", content=[document])])
    assert places == ["messages[0]"]
    assert message == {"role": "user", "content": "A title\nwords"}


PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"type": "image", "source": PNG}, "[image omitted: this model reads text only]"),
        ({"type": "document", "source": PNG}, "[document omitted: this model reads text only]"),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "image", "source": PNG}]},
            },
            "[image omitted: this model reads text only]",
        ),
    ],
)
def test_text_replaces_media_in_tool_results(sent: dict[str, Any], text: str) -> None:
    content = [{"type": "text", "text": "Read:"}, sent]
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
    (message,), _ = messages_of(None, [msgspec.json.decode(json.dumps(turn), type=Turn)])
    assert message == {"role": "tool", "tool_call_id": "a", "content": f"Read:\n{text}"}


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "disabled", "budget_tokens": 0},
        {"type": "enabled", "budget_tokens": 10000},
        {"type": "enabled", "budget_tokens": 100},
    ],
)
def test_thinking_budgets_of_any_size_are_accepted(shared: Any, thinking: dict[str, Any]) -> None:
    assert shared.ask("POST", M, body(thinking=thinking)).status == 200


def test_developer_messages_and_null_content_of_the_assistant_are_accepted() -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b"},
    ]
    messages, _ = messages_of(None, msgspec.json.decode(json.dumps(turns), type=list[Turn]))
    assert messages == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]


def block(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


def assistant_turn(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is null"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"compaction": {"type": "summarize"}}, "compaction was sent"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ({"messages": block(type="image", source={})}, "messages[0].content[0].image was sent"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is missing"),
        ({"messages": block(type="text")}, "messages[0].content[0].text is missing"),
        ({"messages": block(type="video")}, "a block of type 'video'"),
        (
            {"messages": block(type="document", source={"type": "base64"})},
            "messages[0].content[0].document, with a source of type 'base64', was sent",
        ),
        (
            {"messages": block(type="tool_result", content="x")},
            "messages[0].content[0].tool_use_id is missing",
        ),
        (
            {"messages": assistant_turn({"type": "tool_use", "id": "a", "name": "f", "input": {}})},
            "messages ends with",
        ),
        ({"stop_sequences": [""]}, "stop_sequences is ['']"),
        ({"temperature": 3}, "temperature is 3"),
        ({"top_p": "x"}, 'top_p is "x"'),
        ({"thinking": {"type": "loud"}}, "thinking.type is 'loud'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type is 'maybe'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers was sent"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"output_format": {"type": "xml"}}, "output_format.type is 'xml'"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ],
)
def test_errors_name_the_invalid_field(shared: Any, fields: dict[str, Any], words: str) -> None:
    sent = {
        name: value for name, value in body(**fields).items() if name != "max_tokens" or value is not None
    }
    if fields.get("max_tokens", 0) is None:
        words = "max_tokens is missing"
    reply = shared.ask("POST", M, sent)
    assert reply.status == 400, reply.json
    assert reply.json["type"] == "error" and reply.json["error"]["type"] == "invalid_request_error"
    assert words in reply.json["error"]["message"]
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_middleware_errors_have_anthropics_types(serve: Callable[..., Any]) -> None:
    import anthropic

    server = serve(api_keys=["secret"], max_body_bytes=1000)
    key = {"x-api-key": "secret"}
    cases = [
        (server.ask("POST", M, body()), 401, "authentication_error"),
        (server.ask("POST", M, body(model="other"), key), 404, "not_found_error"),
        (server.ask("GET", M, headers=key), 405, "invalid_request_error"),
        (server.ask("POST", M, b"x" * 2000, key), 413, "request_too_large"),
        (server.ask("POST", COUNT, b"{", key), 400, "invalid_request_error"),
    ]
    for reply, status, kind in cases:
        assert (reply.status, reply.json["error"]["type"]) == (status, kind)
        assert reply.json["request_id"] == reply.headers["request-id"]
    assert "request-id" not in server.ask("GET", "/v1/models", headers=key).headers
    assert server.ask("POST", M, body(), key).status == 200
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="The API key is invalid"),
    ):
        client.messages.create(**body())


def test_an_error_after_output_is_an_event(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.fail_after = 2
    *_, (_, name, data) = events_of(server.ask("POST", M, body(stream=True)).body)
    assert name == "error" and data["error"] == {"type": "api_error", "message": "The engine broke."}
    server.engine.fail_after = 0
    reply = server.ask("POST", M, body(stream=True))
    assert reply.status == 500 and reply.json["error"]["type"] == "api_error"


def test_silence_is_filled_with_pings(serve: Callable[..., Any]) -> None:
    import anthropic

    server = serve(keep_alive_s=0.05)
    server.engine.silent_after = 1
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.with_streaming_response.create(**body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        pings = [line for line, _ in zip(lines, range(30), strict=False) if line == "event: ping"]
    assert len(pings) > 2


def test_every_event_has_a_stream_cursor(shared: Any) -> None:
    """The last text may be held back until the end, so the cursor after it is before the last token."""
    reply = shared.ask("POST", M, body(stream=True, max_tokens=2))
    stream = reply.headers["x-stream-id"]
    named = [(name, event_id) for event_id, name, _ in events_of(reply.body) if event_id]
    assert named == [
        ("message_start", f"{stream}:0.0n"),
        ("content_block_start", f"{stream}:0.1t"),
        ("content_block_delta", f"{stream}:1.1t"),
        ("content_block_delta", f"{stream}:1.1t+3"),
        ("content_block_stop", f"{stream}:1.1n+3"),
        ("message_delta", f"{stream}:2e.1n"),
        ("message_stop", f"{stream}:2e.1n"),
    ]


def test_empty_turns_are_empty_messages() -> None:
    assert messages_of("", [Turn(role="user", content=[])])[0] == [{"role": "user", "content": ""}]
    with pytest.raises(RequestError, match="messages ends with"):
        messages_of("", [Turn(role="assistant", content=[])])


def test_an_output_schema_is_enforced(shared: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for request in (
        {"output_format": form, "output_config": {"effort": "low"}},
        {"output_config": {"format": form, "effort": "low"}},
    ):
        assert shared.ask("POST", M, body(**request)).status == 200
        submit = shared.engine.wait_for(Submit)[-1]
        assert json.loads(submit.spec.params.structured_outputs.json) == schema
    assert json.loads(submit.prompt.template_kwargs)["reasoning_effort"] == "low"
