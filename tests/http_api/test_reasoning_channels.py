"""Chat answers in channels: reasoning and tool calls, whole and streamed, read by the openai package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from quintet.detokenizer_proc.parsers.forced import think_marks
from quintet.frontend.api.channels import Channels
from quintet.frontend.streams import Stream, StreamChoice, text_spans
from quintet.wire.channels import Channel
from quintet.wire.config import ParsersConfig
from quintet.wire.messages import Submit
from quintet.wire.request import MAX_SCHEMAS_BYTES, OutputParsing

H = "/v1/chat/completions"
CONTENT, REASONING, NAME, ARGUMENTS = map(int, Channel)
SCRIPT = [
    [(REASONING, 0, "Rain")],
    [(REASONING, 0, "?")],
    [(CONTENT, 0, "I look."), (NAME, 0, "rain"), (ARGUMENTS, 0, '{"in"')],
    [(ARGUMENTS, 0, ': "Oslo"}'), (NAME, 1, "now")],
    [],
    [(ARGUMENTS, 1, "{}")],
]
FUNCTION: dict[str, Any] = {
    "name": "rain",
    "description": "d",
    "parameters": {"properties": {"in": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
BODY: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "rain?"}], "tools": TOOLS}
PARSERS = ParsersConfig(reasoning="qwen3", tools="hermes")


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    server = serve(parsers=PARSERS)
    server.engine.script = SCRIPT
    return server


def submitted(server: Any) -> Submit:
    found: list[Submit] = server.engine.wait_for(Submit)
    return found[-1]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in message["tool_calls"]
    ]


CALLS = [("function", "rain", '{"in": "Oslo"}'), ("function", "now", "{}")]


def test_a_whole_answer(server: Any) -> None:
    answer = server.ask("POST", H, BODY).json
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "I look.",
        "Rain?",
        "Rain?",
    )
    assert calls_of(message) == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert submitted(server).spec.parsing == OutputParsing("qwen3", "hermes")


@pytest.mark.parametrize(
    ("agent", "name", "other"),
    [
        ({"user-agent": "Agents/Python 0.24.0"}, "reasoning", "reasoning_content"),
        ({"accept": "*/*"}, "reasoning_content", "reasoning"),
        ({"user-agent": "", "accept": "*/*"}, "reasoning_content", "reasoning"),
    ],
)
def test_some_clients_get_one_name_of_the_reasoning(
    server: Any, agent: dict[str, str], name: str, other: str
) -> None:
    """OpenAI's Agents SDK, and Rust's reqwest: serde rejects two names of one field."""
    (choice,) = server.ask("POST", H, BODY, agent).json["choices"]
    assert choice["message"][name] == "Rain?" and other not in choice["message"]
    events = server.ask("POST", H, {**BODY, "stream": True}, agent).events
    deltas = [event["choices"][0]["delta"] for event in events if isinstance(event, dict)]
    assert "".join(delta.get(name, "") for delta in deltas) == "Rain?"
    assert not any(other in delta for delta in deltas)


def test_a_streamed_answer_equals_the_whole_one(server: Any) -> None:
    options = {"stream_options": {"include_usage": True}}
    events = server.ask("POST", H, {**BODY, **options, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:3] == [{"reasoning": t, "reasoning_content": t} for t in ("Rain", "?")]
    assert deltas[3] == {"content": "I look."}  # a chunk has one kind of text, or one call
    (started,) = deltas[4]["tool_calls"]
    assert started == {
        "index": 0,
        "id": started["id"],
        "type": "function",
        "function": {"name": "rain", "arguments": '{"in"'},
    }
    assert deltas[5] == {"tool_calls": [{"index": 0, "function": {"arguments": ': "Oslo"}'}}]}
    (second,) = deltas[6]["tool_calls"]
    assert (second["index"], second["function"]) == (1, {"name": "now", "arguments": ""})
    assert len(deltas) == 8  # the token without text has no event
    assert all(len(delta) == 1 or "reasoning" in delta for delta in deltas[1:])
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_the_openai_package_assembles_the_stream(server: Any) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="x")
    with client.chat.completions.stream(**BODY, n=2) as stream:
        final = stream.get_final_completion()
    ids = set()
    for choice in final.choices:
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("rain", '{"in": "Oslo"}'),
            ("now", "{}"),
        ]
        ids |= {call.id for call in calls}
    assert len(ids) == 4


def test_request_options_select_channels(server: Any) -> None:
    def message(**changes: Any) -> dict[str, Any]:
        (choice,) = server.ask("POST", H, {**BODY, **changes}).json["choices"]
        found: dict[str, Any] = choice["message"]
        return found

    assert message(include_reasoning=False)["reasoning"] is None
    assert calls_of(message(parallel_tool_calls=False)) == CALLS[:1]
    server.ask("POST", H, {**BODY, "tool_choice": "none"})
    assert submitted(server).spec.parsing == OutputParsing("qwen3")
    server.ask("POST", H, {key: value for key, value in BODY.items() if key != "tools"})
    assert submitted(server).spec.parsing == OutputParsing("qwen3")


def test_content_is_null_if_there_are_only_calls(server: Any) -> None:
    server.engine.script = [[(NAME, 0, "now")], [(ARGUMENTS, 0, "{}")]]
    (choice,) = server.ask("POST", H, BODY).json["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, None)


def test_token_ids_include_tokens_without_text(server: Any) -> None:
    events = server.ask("POST", H, {**BODY, "stream": True, "return_token_ids": True}).events
    ids = [token for event in events[1:] for token in event["choices"][0]["token_ids"]]
    assert ids == [10, 11, 12, 13, 14, 15]


def test_schemas_are_submitted_if_the_format_has_no_types(serve: Callable[..., Any]) -> None:
    server = serve(parsers=ParsersConfig(tools="qwen3_coder", needs_schemas=True))
    server.ask("POST", H, BODY)
    parsing = submitted(server).spec.parsing
    assert parsing is not None
    assert (parsing.tools, json.loads(parsing.schemas)) == ("qwen3_coder", TOOLS)
    long = [{"type": "function", "function": {**FUNCTION, "description": "d" * MAX_SCHEMAS_BYTES}}]
    refused = server.ask("POST", H, {**BODY, "tools": long})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("choice", "names", "is_one"),
    [
        ("required", ["rain", "snow"], False),
        ({"type": "function", "function": {"name": "snow"}}, ["snow"], True),
    ],
)
def test_required_calls_are_structured_output(
    server: Any, choice: Any, names: list[str], is_one: bool
) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "snow"}}]
    server.ask("POST", H, {**BODY, "tools": tools, "tool_choice": choice})
    spec = submitted(server).spec
    assert spec.parsing == OutputParsing("qwen3", "hermes", requires_calls=True)
    form = spec.params.structured_outputs
    assert form is not None and form.structural_tag is not None
    (calls,) = json.loads(form.structural_tag)["format"]["elements"]
    schema = {"type": "object", **FUNCTION["parameters"], "additionalProperties": False}
    schemas = {"rain": schema, "snow": {"type": "object"}}
    assert [(tag["begin"], tag["content"]["json_schema"]) for tag in calls["tags"]] == [
        (f'<tool_call>\n{{"name": "{name}", "arguments": ', schemas[name]) for name in names
    ]
    assert calls["stop_after_first"] == is_one


@pytest.mark.parametrize(("parser", "reader"), [("hermes", "hermes"), ("qwen3_coder", "hermes")])
def test_a_schema_with_tools_allows_calls(serve: Callable[..., Any], parser: str, reader: str) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3", tools=parser))
    request = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    }
    server.ask("POST", H, {**BODY, **request})
    spec = submitted(server).spec
    form = spec.params.structured_outputs
    assert form is not None and form.json is not None and '{\\"name\\": \\"rain\\"' in form.calls
    assert spec.parsing == OutputParsing("qwen3", reader)
    server.ask("POST", H, {**BODY, **request, "tool_choice": "none"})
    form = submitted(server).spec.params.structured_outputs
    assert form is not None and form.calls == ""


@pytest.mark.parametrize("path", [H, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_rendered_request_has_the_same_structured_output(
    serve: Callable[..., Any], path: str, is_flat: bool
) -> None:
    """With a schema and tools, the output is JSON of the schema or a call."""
    server = serve(parsers=ParsersConfig(tools="hermes"))
    schema, anthropic_tool = {"type": "object"}, {"name": "rain", "input_schema": {"type": "object"}}
    tools = [{"type": "function", **FUNCTION}] if is_flat else TOOLS
    body = {
        H: {**BODY, "tools": tools, "response_format": {"type": "json_schema", "schema": schema}},
        "/v1/responses": {
            "input": "x",
            "tools": tools,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        },
        "/v1/messages": {
            "messages": BODY["messages"],
            "max_tokens": 4,
            "tools": [anthropic_tool],
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }[path]
    assert server.ask("POST", path, body).status == 200
    form = submitted(server).spec.params.structured_outputs
    assert form is not None and "rain" in form.calls
    rendered = server.ask("POST", f"{path}/render", body)
    assert rendered.status == 200, rendered.json
    assert server.ask("POST", "/inference/v1/generate", {**rendered.json, "stream": False}).status == 200
    assert submitted(server).spec.params.structured_outputs == form


def test_a_batch_has_the_same_structured_output(serve: Callable[..., Any]) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3", tools="hermes"))
    flat = [{"type": "function", **FUNCTION}]
    request = {**BODY, "tools": flat, "response_format": {"type": "json_object"}}
    server.ask("POST", H, request)
    expected = submitted(server).spec
    answer = server.ask("POST", f"{H}/batch", {**request, "messages": [BODY["messages"]]})
    assert answer.status == 200, answer.json
    spec = submitted(server).spec
    assert spec.params.structured_outputs == expected.params.structured_outputs
    assert spec.parsing == expected.parsing


def test_a_model_without_parsers_has_only_content(serve: Callable[..., Any]) -> None:
    server = serve()
    answer = server.ask("POST", H, BODY).json
    assert submitted(server).spec.parsing is None
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": " t0 t1 t2 t3",
        "refusal": None,
    }
    assert "completion_tokens_details" not in answer["usage"]


def test_call_ids_have_the_format_of_the_template() -> None:
    assert (
        Channels("r").call_id(0, 0, "f")
        == Channels("r").call_id(0, 0, "f")
        != Channels("r").call_id(0, 1, "f")
    )
    assert Channels("r", "numbered", 3).call_id(0, 1, "f") == "functions.f:4"
    short = Channels("r", "short").call_id(0, 0, "f")
    assert len(short) == 9 and short.isalnum()


def test_spans_of_received_text_are_dropped(server: Any) -> None:
    server.ask("POST", H, BODY)
    stream = Stream(submitted(server), None, lambda _: None)  # type: ignore[arg-type]
    spans = [(REASONING, 0, 4), (CONTENT, 0, 2), (NAME, 0, 3), (ARGUMENTS, 0, 2)]
    text = "thinokrun{}"
    for seen in range(len(text) + 1):
        choice = StreamChoice(stream, 0, 7)
        choice.note_spans(spans, seen)
        assert [part for _, _, part in text_spans(text[seen:], choice.spans)] == [
            part
            for part in (
                "thin"[seen:],
                "ok"[max(0, seen - 4) :],
                "run"[max(0, seen - 6) :],
                "{}"[max(0, seen - 9) :],
            )
            if part
        ]


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("It rains", "</think>"),
        ("<think>\nWhere", "<think>"),
        ("<think>\nWhere?\n</think>\n\nIn", "</think>"),
        ("", ""),
    ],
)
def test_a_continued_message_determines_whether_its_reasoning_has_ended(
    serve: Callable[..., Any], text: str, mark: str
) -> None:
    """As after a model's cut answer, or a prefix such as "<think>" that makes DeepSeek R1 think."""
    server = serve(parsers=ParsersConfig(reasoning="deepseek_r1", thinks=think_marks("deepseek_r1")))
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": text}]
    body = {"messages": turns, "continue_final_message": True}
    assert server.ask("POST", H, body).status == 200
    assert submitted(server).spec.parsing == OutputParsing("deepseek_r1", prompt_end=mark)
    assert server.ask("POST", H, {"messages": turns}).status == 200
    assert submitted(server).spec.parsing == OutputParsing("deepseek_r1")
