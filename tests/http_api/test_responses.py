"""The Responses dialect: input items, every event in order, errors, and resumption after any event."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from quintet.frontend.api.channels import Channels
from quintet.frontend.api.openai.answer import AnswerOptions
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.items import messages_of
from quintet.frontend.api.responses.output import CallForm, ResponsesAnswer
from quintet.frontend.api.responses.parse import items_of
from quintet.frontend.api.responses.types import ResponsesBody
from quintet.frontend.resume.stream_state import StreamCursor, StreamId
from quintet.frontend.streams import Batch, OutputDelta
from quintet.wire.channels import Channel
from quintet.wire.chat import decode_messages
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import Cancel, ChatPrompt, Finish, FinishReason, Started, Submit
from quintet.wire.request import OutputParsing

R = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
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
RAIN: Any = {
    "type": "function",
    "name": "rain",
    "description": "Whether it rains.",
    "parameters": {"type": "object", "properties": {"in": {"type": "string"}}},
    "strict": True,
}
NOW: Any = {"type": "function", "name": "now", "parameters": None, "strict": None}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "input": "hello", "max_output_tokens": 4, **fields}


@pytest.fixture
def parsing(serve: Callable[..., Any]) -> Any:
    server = serve(parsers=ParsersConfig(reasoning="qwen3", tools="hermes"))
    server.engine.script = SCRIPT
    return server


def sent(server: Any) -> Any:
    return server.engine.wait_for(Submit)[-1]


def messages(server: Any) -> Any:
    prompt = sent(server).prompt
    assert isinstance(prompt, ChatPrompt)
    return decode_messages(prompt.messages)


def test_a_whole_answer(shared: Any) -> None:
    reply = shared.ask("POST", R, ask(metadata={"a": "b"}, temperature=0.5, user="me"))
    assert reply.status == 200
    whole = reply.json
    assert whole.pop("id").startswith("resp_") and whole.pop("created_at") > 0
    (message,) = whole.pop("output")
    assert message.pop("id").startswith("msg_")
    text = {"type": "output_text", "annotations": [], "logprobs": [], "text": " t0 t1 t2 t3"}
    assert message == {
        "type": "message",
        "status": "incomplete",
        "role": "assistant",
        "content": [text],
    }
    assert whole == {
        "object": "response",
        "model": "toy",
        "background": False,
        "frequency_penalty": 0,
        "store": True,
        "instructions": None,
        "max_output_tokens": 4,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "me",
        "status": "incomplete",
        "usage": {
            "input_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 6,
        },
        "completed_at": None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
    }


def test_a_streamed_answer_has_every_event_in_order(shared: Any) -> None:
    reply = shared.ask("POST", R, ask(stream=True, max_output_tokens=2, stop=["9"]))
    events = reply.events
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    names = [line.removeprefix(b"event: ") for line in reply.body.split(b"\n") if line.startswith(b"event: ")]
    assert [name.decode() for name in names] == [event["type"] for event in events]
    assert b"[DONE]" not in reply.body
    created, _, added, part, first, second, done, _, item, last = events
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert added["item"]["content"] == [] and part["part"]["text"] == ""
    assert [first["delta"], second["delta"], done["text"]] == [" t0", " t1", " t0 t1"]
    assert {event["item_id"] for event in (part, first, second, done)} == {item["item"]["id"]}
    assert last["response"]["output"] == [item["item"]]
    assert last["response"]["usage"]["output_tokens"] == 2


def test_the_openai_package_reads_whole_and_streamed_answers(client: OpenAI, shared: Any) -> None:
    whole = client.responses.create(model="toy", input="hello", extra_body={"stop": ["3"]})
    assert whole.status == "completed" and whole.output_text == " t0 t1 t2" and whole.completed_at
    with client.responses.stream(model="toy", input="hello", extra_body={"stop": ["3"]}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert deltas == [" t0", " t1", " t2"]
    assert streamed.output_text == whole.output_text and streamed.usage == whole.usage


def test_reasoning_text_and_calls_are_items(parsing: Any) -> None:
    with OpenAI(base_url=f"{parsing.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "toy", "input": "rain?", "tools": [RAIN, NOW]}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    response: Any
    for response in (whole, streamed):
        assert [summary_of(item) for item in response.output] == [
            ("reasoning", "Rain?"),
            ("message", "I look."),
            ("function_call", "rain", '{"in": "Oslo"}'),
            ("function_call", "now", "{}"),
            ("message", "So. Bye!"),
        ]
        assert response.status == "completed"
        assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 2
        ids = [item.id for item in response.output]
        assert len(set(ids)) == 5
        assert response.tools[0].to_dict() == RAIN
    assert sent(parsing).spec.parsing == OutputParsing("qwen3", "hermes")
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [
        '{"in": "Oslo"}',
        "{}",
    ]
    assert [e.text for e in events if e.type == "response.reasoning_text.done"] == ["Rain?"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [RAIN, NOW], "max_output_tokens": 100},
        {"top_logprobs": 2},
        {"text": {"verbosity": "low"}},
    ],
)
@pytest.mark.parametrize("fail_after", [None, 1])
def test_events_and_responses_match_the_types_of_the_openai_package(
    parsing: Any, fields: Any, fail_after: int | None
) -> None:
    """Validates explicitly: the package builds its objects without validation."""
    parsing.engine.fail_after = fail_after
    if "tools" not in fields:
        parsing.engine.script = []
    events = parsing.ask("POST", R, ask(stream=True, **fields)).events
    for event in events:
        EVENT.validate_python(event)
    last = (
        "response.failed"
        if fail_after
        else "response.completed"
        if "tools" in fields
        else "response.incomplete"
    )
    assert events[-1]["type"] == last
    response_id = events[0]["response"]["id"]
    kept = Response.model_validate(parsing.ask("GET", f"{R}/{response_id}").json)
    assert kept == Response.model_validate(events[-1]["response"])
    listed = parsing.ask("GET", f"{R}/{response_id}/input_items").json
    assert len(ResponseItemList.model_validate(listed).data) == 1


def summary_of(item: Any) -> tuple[str, ...]:
    assert item.status == "completed"
    if item.type == "function_call":
        assert item.call_id.startswith("call_")
        return item.type, item.name, item.arguments
    (part,) = item.content
    return item.type, part.text


def test_parallel_calls_and_reasoning_can_be_disabled(parsing: Any) -> None:
    for stream in (False, True):
        body = ask(
            tools=[RAIN, NOW],
            parallel_tool_calls=False,
            include_reasoning=False,
            stream=stream,
            max_output_tokens=50,
        )
        reply = parsing.ask("POST", R, body)
        response = reply.events[-1]["response"] if stream else reply.json
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["message", "function_call", "message"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_an_agent_loop_sends_all_items_back(parsing: Any) -> None:
    """Output items are sent back unchanged, followed by the results of calls."""
    with OpenAI(base_url=f"{parsing.url}/v1", api_key="none", max_retries=0) as client:
        conversation: list[Any] = [{"role": "user", "content": "rain?"}]
        first = client.responses.create(model="toy", input=conversation, tools=[RAIN, NOW])
        conversation += first.output
        for item in first.output:
            if item.type == "function_call":
                conversation.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": f"of {item.name}"}
                )
        parsing.engine.script = [[(CONTENT, 0, "Yes.")]]
        last = client.responses.create(
            model="toy", input=conversation, tools=[RAIN, NOW], instructions="Be kind."
        )
    assert last.output_text == "Yes." and last.status == "completed"
    system, user, assistant, rain, now = messages(parsing)
    assert system == {"role": "system", "content": "Be kind."}
    assert user == {"role": "user", "content": "rain?"}
    assert assistant["content"] == "I look.\nSo. Bye!" and assistant["reasoning_content"] == "Rain?"
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "rain", "arguments": '{"in": "Oslo"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert [call["id"] for call in assistant["tool_calls"]] == [rain["tool_call_id"], now["tool_call_id"]]
    assert (rain["name"], rain["content"], now["content"]) == ("rain", "of rain", "of now")


def test_structured_output_is_parsed_by_the_package(client: OpenAI, shared: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(model="toy", input="x", text={"format": form, "verbosity": "low"})
    form_sent = sent(shared).spec.params.structured_outputs
    assert form_sent is not None and json.loads(form_sent.json) == schema
    assert response.text is not None and response.text.format is not None
    assert response.text.format.to_dict() == form
    nested: Any = {"type": "json_schema", "name": "x", "json_schema": {"schema": schema, "strict": True}}
    again = client.responses.create(model="toy", input="x", text={"format": nested}).text
    assert again is not None and again.format == response.text.format
    client.responses.create(model="toy", input="x", text={"format": {"type": "json_object"}})
    form_sent = sent(shared).spec.params.structured_outputs
    assert form_sent is not None and form_sent.json_object


def test_logprobs_are_those_of_the_text(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "toy",
        "input": "x",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields, max_output_tokens=4) as stream:
        streamed = [
            part for event in stream if event.type == "response.output_text.delta" for part in event.logprobs
        ]
    message = whole.output[0]
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert (
        [each.token for each in logprobs] == [" t0", " t1", " t2", " t3"] == [each.token for each in streamed]
    )
    assert [top.token for top in logprobs[0].top_logprobs] == [" t0", " t1"]
    assert logprobs[0].bytes == list(b" t0")


def test_tool_choice_matches_the_chat_dialect(parsing: Any) -> None:
    named = {"type": "function", "name": "now"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, allowed):
        reply = parsing.ask("POST", R, ask(tools=[RAIN, NOW], tool_choice=choice))
        assert reply.status == 200 and reply.json["tool_choice"] == choice
        submit = sent(parsing)
        assert submit.spec.params.structured_outputs is not None and submit.spec.parsing.requires_calls
        tag = submit.spec.params.structured_outputs.structural_tag
        assert "now" in tag and "rain" not in tag
    assert [tool["function"]["name"] for tool in json.loads(sent(parsing).prompt.tools)] == ["now"]
    parsing.ask("POST", R, ask(tools=[RAIN], tool_choice="none"))
    assert sent(parsing).spec.parsing == OutputParsing("qwen3")
    parsing.ask("POST", R, ask(tool_choice="auto", tools=[]))
    assert sent(parsing).prompt.tools == b""


def test_render_allows_large_max_output_tokens_and_errors_name_this_dialects_fields(shared: Any) -> None:
    rendered = shared.ask("POST", f"{R}/render", ask(max_output_tokens=10**6)).json
    assert len(rendered["token_ids"]) + rendered["sampling_params"]["max_tokens"] == 256
    unlimited = shared.ask("POST", f"{R}/render", ask(max_output_tokens=None)).json
    assert unlimited["sampling_params"]["max_tokens"] is None
    refused = shared.ask("POST", f"{R}/render", ask(truncation="auto"))
    assert refused.status == 400 and refused.json["error"]["param"] == "truncation"
    assert refused.json["error"]["message"].startswith("truncation")


def test_settings_reach_the_engine(shared: Any) -> None:
    body = ask(
        seed=3,
        top_k=5,
        temperature=0,
        truncation="auto",
        reasoning={"effort": "low"},
        cache_salt="s",
        priority=2,
    )
    assert shared.ask("POST", R, body).json["reasoning"] == {"effort": "low", "summary": None}
    spec = sent(shared).spec
    assert (spec.params.seed, spec.params.truncate_prompt_tokens, spec.priority) == (3, -1, 2)
    assert spec.params.greedy and spec.cache_salt == "s" and sent(shared).clamp_max_tokens
    assert json.loads(sent(shared).prompt.template_kwargs)["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "at least one item"),
        ({"input": None}, "input", "is missing"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "robot"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "image input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"text": 1}]}]},
            None,
            "input[0].output[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "name is missing"),
        ({"tool_choice": "required"}, "tool_choice", "tools is not"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tools is not"),
        ({"tools": [RAIN], "tool_choice": {"type": "robot"}}, None, "robot"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"temperature": 3}, "temperature", "temperature is 3"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort is 'huge'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "loud"),
        ({"top_logprobs": 99}, "top_logprobs", "99"),
        ({"truncation": "left"}, "truncation", "left"),
        ({"include": ["all"]}, "include", "all"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "64"),
        ({"prompt": {"id": "x"}}, "prompt", "stored prompts"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"background": True, "store": False}, "background", "would not be stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "msg_1"),
        ({"conversation": 7}, "conversation", "7"),
        ({"conversation": "conv_1", "store": False}, "conversation", "store"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation", "one of them"),
        ({"vllm_xargs": {"a": {}}}, "vllm_xargs", "vllm_xargs"),
        ({"model": "absent"}, "model", "absent"),
    ],
)
def test_invalid_requests_are_refused(
    shared: Any, fields: dict[str, Any], param: str | None, words: str
) -> None:
    reply = shared.ask("POST", R, ask(**fields))
    assert reply.status == (404 if param == "model" else 400), reply.body
    error = reply.json["error"]
    assert words in error["message"]
    assert param is None or error["param"] == param


def test_the_openai_package_raises_errors_and_reports_failures(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.fail_after = 2
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="The engine broke"):
            client.responses.create(model="toy", input="x")
        last = list(client.responses.create(model="toy", input="x", stream=True))[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed" and last.response.error is not None
        assert last.response.error.code == "server_error" and "broke" in last.response.error.message
        with pytest.raises(openai.BadRequestError, match="name is missing"):
            client.responses.create(model="toy", input="x", tools=[{"type": "function"}])  # type: ignore[list-item]


def test_a_disconnect_cancels_the_response(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.silent_after = 2
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for event in client.responses.create(model="toy", input="x", stream=True):
            if event.type == "response.output_text.delta":
                break
    assert len(server.engine.wait_for(Cancel)) == 1


def test_untyped_items_are_messages_and_adjacent_items_are_merged() -> None:
    body = ResponsesBody(
        input=json.dumps(  # type: ignore[arg-type]
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"role": "user", "content": "b"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": "c"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            ]
        ).encode()
    )
    messages, places = messages_of("First.", items_of(body))
    assert places == ["instructions", "input[0]", "input[1]", "input[3]", "input[5]"]
    assert messages == [
        {"role": "system", "content": "First."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "No.", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]


OMITTED = "[image omitted: this model reads text only]"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([{"type": "input_image", "image_url": "data:image/png;base64,aGk="}], OMITTED),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}],
            f"a\n{OMITTED}",
        ),
        ([{"type": "input_file", "file_data": "aGk="}], "[file omitted: this model reads text only]"),
        (["x", "y"], "x\ny"),
        ([{"a": 1}, {"b": [2]}], '[{"a":1},{"b":[2]}]'),
        ([{"a": 1}, "x"], '{"a":1}\nx'),
        ([1, 2], "[1,2]"),
        ({"a": 1}, '{"a":1}'),
        ({}, "{}"),
        ([{"type": "file", "name": "a.py"}], '[{"type":"file","name":"a.py"}]'),
        ([{"stdout": "out\n", "outcome": {"type": "exit", "exit_code": 2}}], "out\n[exit code 2]"),
        ([], ""),
    ],
)
def test_tool_results_are_text(output: Any, text: str) -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    body = ResponsesBody(input=json.dumps([item]).encode())  # type: ignore[arg-type]
    assert messages_of(None, items_of(body))[0] == [{"role": "tool", "tool_call_id": "c", "content": text}]


def test_an_image_in_a_tool_message_is_omitted() -> None:
    item = {
        "role": "tool",
        "tool_call_id": "c",
        "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
    }
    body = ResponsesBody(input=json.dumps([item]).encode())  # type: ignore[arg-type]
    assert messages_of(None, items_of(body))[0] == [{"role": "tool", "tool_call_id": "c", "content": OMITTED}]


# --- resumed streams ----------------------------------------------------------------------------------------------

STREAM = StreamId(7, b"k" * 16)


FORMS: dict[str, CallForm] = {
    "rain": CallForm("custom", "rain"),
    "now": CallForm("function", "now", "clock"),
}


def events(
    tokens: list[Token],
    position: StreamCursor | None,
    draw: random.Random,
    parallel: bool,
    forms: dict[str, CallForm] | None = None,
) -> list[tuple[str, Any]]:
    """Return id and data of the events after a cursor. A step has 1 to 3 tokens, drawn at random."""
    channels = Channels("resp_1", parallel_calls=parallel)
    options = AnswerOptions("resp_1", 0, "toy", 1)
    writer = ResponsesWriter(
        ResponsesAnswer(1, 1, 1, options, channels, b'{"id":"resp_1"}', calls=forms or {}), STREAM, position
    )
    choice = SimpleNamespace(num_taken=0)
    stream: Any = SimpleNamespace(choices=[choice], num_output_tokens=len(tokens))
    frames: list[bytes] = []
    writer.write(frames, 0, stream, Batch(Started(7, 2, 0, 0, 0), []))
    while choice.num_taken < len(tokens):
        at, choice.num_taken = choice.num_taken, min(len(tokens), choice.num_taken + draw.randint(1, 3))
        new = [piece for token in tokens[at : choice.num_taken] for piece in token]
        finish = Finish(7, FinishReason.STOP, None, 0, 2, 2) if choice.num_taken == len(tokens) else None
        spans = [(channel, call, len(text)) for channel, call, text in new]
        delta = OutputDelta(0, "".join(text for _, _, text in new), [0], [], finish, spans)
        writer.write(frames, 0, stream, Batch(None, [delta]))
    lines = [frame.decode().splitlines() for frame in [*frames, writer.tail([])] if frame]
    return [(each[0].removeprefix("id: "), json.loads(each[2].removeprefix("data: "))) for each in lines]


def joined_events(found: list[tuple[str, Any]]) -> list[Any]:
    """Return the events with adjacent deltas joined."""
    joined: list[Any] = []
    for number, (_, event) in enumerate(found):
        assert event.pop("sequence_number") >= number
        for response in (event.get("response"),):
            if response:
                response.pop("completed_at")
        if "delta" in event and joined and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("forms", [{}, FORMS])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_stream_resumes_after_any_event(parallel: bool, forms: dict[str, CallForm]) -> None:
    draw = random.Random(5)
    expected = joined_events(events(SCRIPT, None, random.Random(1), parallel, forms))
    for _ in range(40):
        first = events(SCRIPT, None, draw, parallel, forms)
        for cut in range(1, len(first) + 1):
            stream, _, position = first[cut - 1][0].partition(":")
            assert StreamId.parse(stream) == STREAM
            rest = events(SCRIPT, StreamCursor.parse(position, 1), draw, parallel, forms)
            assert [event["sequence_number"] for _, event in rest] == list(range(cut, cut + len(rest)))
            both = json.loads(json.dumps(first[:cut] + rest))
            assert joined_events(both) == expected


def test_a_cursor_of_another_dialect_is_refused() -> None:
    with pytest.raises(RequestError, match="the id of the last event"):
        events(SCRIPT, StreamCursor.parse("3.2t", 1), random.Random(1), True)


def test_an_unknown_type_error_names_its_field(shared: Any) -> None:
    body = {"model": "toy", "input": "x", "tools": [RAIN], "tool_choice": {"type": "robot"}}
    error = shared.ask("POST", "/v1/responses", body).json["error"]
    assert error["param"] == "tool_choice.type"
    assert error["message"].startswith("tool_choice.type, 'robot', was sent")
