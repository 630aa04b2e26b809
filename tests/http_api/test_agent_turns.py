"""Turns that agents send: files beside results, options of system messages, messages of other agents, empty input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from openai import OpenAI
from openai.types.responses import ResponseIncludable

from quintet.wire.channels import Channel
from quintet.wire.chat import decode_messages
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Submit
from tests.http_api.chat_prompts import H, M, R, messages_of, prompt_of

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.pdf"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "PDF file read: a.pdf"}

Json = dict[str, Any]


def system(**fields: Any) -> Json:
    return {"role": "system", **fields}


# --- chat completions ---------------------------------------------------------------------------------------------


def test_anthropics_blocks_of_calls_and_results_are_calls_and_tool_messages(shared: Any) -> None:
    question = {"type": "text", "text": "Continue."}
    sent = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, CALL]},
        {"role": "user", "content": [RESULT, question]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{**RESULT, "content": [question]}]},
    ]
    prompt = prompt_of(shared, H, {"messages": sent, "tools": [{"name": "Read", "input_schema": SCHEMA}]})
    function = {"name": "Read", "arguments": CALL["input"]}
    calls = [{"id": "toolu_1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "toolu_1", "name": "Read"}
    assert decode_messages(prompt.messages) == [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I read it."}], "tool_calls": calls},
        {**result, "content": RESULT["content"]},
        {"role": "user", "content": [question]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {**result, "content": [question]},
    ]
    assert prompt.message_names == [f"messages[{i}]" for i in (0, 1, 2, 2, 3, 4)]


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", {"type": "tool_result", "content": "x"}, "tool_use_id must be a string"),
        ("assistant", {**CALL, "id": ["toolu_1"]}, "id ['toolu_1']; id must be a string"),
    ],
)
def test_errors_name_the_wrong_field_of_a_block(shared: Any, role: str, block: Json, reason: str) -> None:
    refused = shared.ask("POST", H, {"messages": [*HELLO, {"role": role, "content": [block]}]})
    assert refused.status == 400 and reason in refused.json["error"]["message"]
    assert refused.json["error"]["param"] == f"messages[{len(HELLO)}].content[0]"


def test_blocks_of_calls_that_are_in_tool_calls_too_are_unchanged(shared: Any) -> None:
    calls = [{"id": "toolu_1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}]
    answer = {"role": "assistant", "content": [CALL], "tool_calls": calls}
    sent = [{"role": "user", "content": "What is tool_use?"}, answer]
    assert messages_of(shared, H, {"messages": sent}) == sent


def test_calls_without_text_have_null_content(shared: Any) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "Read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    turns = [{"role": "assistant", "content": [thought, CALL]}, {"role": "user", "content": [RESULT]}]
    for path, body in ((M, {"messages": [*HELLO, *turns]}), (R, {"input": [*HELLO, *items]})):
        answer = messages_of(shared, path, body)[1]
        assert (answer["content"], answer["reasoning_content"]) == (None, "hm")


# --- Anthropic's API ----------------------------------------------------------------------------------------------


def test_text_replaces_a_file_beside_the_result_that_announces_it(shared: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    content = [image, RESULT, PDF, {"type": "text", "text": "Continue."}]
    turns = [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": content}]
    *_, result, user = messages_of(shared, M, {"messages": turns})
    assert (result["role"], result["content"]) == ("tool", "PDF file read: a.pdf")
    omitted = [f"[{name} omitted: this model reads text only]" for name in ("image", "document")]
    assert user == {"role": "user", "content": "\n".join([*omitted, "Continue."])}


def test_an_unknown_block_in_a_result_does_not_end_the_conversation(shared: Any) -> None:
    result = {**RESULT, "content": [{"type": "browser_state", "tabs": []}, {"type": "text", "text": "Done."}]}
    turns = [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
    message = messages_of(shared, M, {"messages": turns})[-1]
    assert message["content"] == "[browser_state omitted: this model reads text only]\nDone."


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_system_message_may_only_set_the_effort(shared: Any, fields: Json) -> None:
    turns = [*HELLO, system(**fields, output_config={"effort": "high"})]
    prompt = prompt_of(shared, M, {"messages": turns, "output_config": {"effort": "low"}})
    assert decode_messages(prompt.messages) == HELLO
    assert json.loads(prompt.template_kwargs)["reasoning_effort"] == "high"


def test_a_system_message_is_hidden_before_the_next_user_message(shared: Any) -> None:
    late = system(content="Plan mode.", clear_at="next_user_message")
    assert messages_of(shared, M, {"messages": [*HELLO, late]})[-1]["content"] == "Plan mode."
    turns = [*HELLO, late, {"role": "assistant", "content": "Yes."}, *HELLO]
    assert [each["role"] for each in messages_of(shared, M, {"messages": turns})] == [
        "user",
        "assistant",
        "user",
    ]


def test_an_empty_final_assistant_message_is_no_prefill(shared: Any) -> None:
    for content in ("", []):
        turns = [*HELLO, {"role": "assistant", "content": content}]
        prompt = prompt_of(shared, M, {"messages": turns})
        assert decode_messages(prompt.messages) == HELLO and prompt.message_names == ["messages[0]"]
        assert prompt.add_generation_prompt and not prompt.continue_final_message


def test_tools_defined_in_a_message_are_shown_there_and_callable(serve: Callable[..., Any]) -> None:
    server = serve(parsers=ParsersConfig(tools="hermes"))
    tool = {"name": "later", "description": "Read a file.", "input_schema": SCHEMA}
    added = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}},
        {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "server_name": "x"}},
        {
            "type": "tool_addition",
            "tool": {
                "type": "tool_definition",
                "definition": {"type": "mcp_toolset", "mcp_server_name": "x"},
            },
        },
    ]
    body = {"messages": [*HELLO, system(content=added)], "tools": [{**tool, "name": "first"}]}
    prompt = prompt_of(server, M, body)
    message = decode_messages(prompt.messages)[-1]
    definition = json.loads(message["content"].removeprefix("Tool available: "))
    assert definition["function"] == {
        "name": "later",
        "description": "Read a file.",
        "parameters": SCHEMA,
    }
    assert [each["function"]["name"] for each in json.loads(prompt.tools)] == ["first"]
    prompt_of(server, M, {**body, "tool_choice": {"type": "tool", "name": "later"}})
    form = server.engine.wait_for(Submit)[-1].spec.params.structured_outputs
    assert form is not None and "later" in form.structural_tag


@pytest.mark.parametrize("tools", [{}, {"tools": []}])
@pytest.mark.parametrize("kind", ["auto", "none"])
def test_an_optional_call_without_tools_is_no_call(shared: Any, tools: Json, kind: str) -> None:
    assert prompt_of(shared, M, {"messages": HELLO, "tool_choice": {"type": kind}, **tools}).tools == b""


def test_max_tokens_0_caches_the_prompt_without_an_answer(shared: Any) -> None:
    reply = shared.ask("POST", M, {"model": "toy", "max_tokens": 0, "messages": HELLO})
    assert reply.status == 200, reply.json
    assert (reply.json["content"], reply.json["stop_reason"]) == ([], "max_tokens")
    assert reply.json["usage"]["output_tokens"] == 0 and reply.json["usage"]["input_tokens"] > 0
    assert shared.engine.wait_for(Submit)[-1].spec.params.max_tokens == 1
    refused = shared.ask("POST", M, {"max_tokens": 0, "messages": HELLO, "stream": True})
    assert refused.status == 400 and refused.json["error"]["message"].startswith("max_tokens is 0")


# --- Responses API ------------------------------------------------------------------------------------------------


def test_messages_of_other_agents_are_user_messages(shared: Any) -> None:
    parts = [
        {"type": "input_text", "text": "Sender: /root\nPayload:"},
        {"type": "encrypted_content", "encrypted_content": "count"},
    ]
    sent = {"type": "agent_message", "author": "/root", "recipient": "/root/worker", "content": parts}
    items = [sent, {"type": "agent_message", "content": "Now."}]
    assert messages_of(shared, R, {"input": items}) == [
        {"role": "user", "content": "Sender: /root\nPayload:\ncount\nNow."}
    ]


def test_text_replaces_the_image_of_a_tool_in_the_users_message_after_its_result(shared: Any) -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": "attached"}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}
    (*_, user) = messages_of(shared, R, {"input": [result, image, *HELLO]})
    assert user["content"] == "[image omitted: this model reads text only]\nhello"
    refused = shared.ask("POST", R, {"input": [result, {"role": "assistant", "content": "Done."}, image]})
    assert refused.status == 400 and refused.json["error"]["param"] == "input"


def test_an_item_updates_effort_and_format_for_the_following_responses(shared: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    items = [
        {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": form}},
        *HELLO,
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
    ]
    prompt = prompt_of(shared, R, {"input": items, "reasoning": {"effort": "medium"}})
    assert decode_messages(prompt.messages) == HELLO
    assert json.loads(prompt.template_kwargs)["reasoning_effort"] == "high"
    submit = shared.engine.wait_for(Submit)[-1]
    assert json.loads(submit.spec.params.structured_outputs.json) == SCHEMA
    first = shared.ask("POST", R, {"input": items, "max_output_tokens": 2}).json
    prompt = prompt_of(shared, R, {"previous_response_id": first["id"], "input": "x"})
    assert json.loads(prompt.template_kwargs)["reasoning_effort"] == "high"


@pytest.mark.parametrize("originator", ["codex_cli_rs", "codex-tui", "Codex Desktop", None])
def test_codex_reads_that_a_prompt_exceeds_the_context_in_an_event(
    serve: Callable[..., Any], originator: str | None
) -> None:
    server = serve()
    server.engine.fail_after, server.engine.fails_with = 0, ErrorCode.TOO_LONG
    headers = {} if originator is None else {"originator": originator}
    reply = server.ask("POST", R, {"input": "x", "stream": True}, headers)
    if originator is None:
        assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"
        return
    *_, failed = events = reply.events
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert failed["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "The engine broke.",
    }
    stored = server.ask("GET", f"{R}/{failed['response']['id']}").json
    assert stored["status"] == "failed"
    whole = server.ask("POST", R, {"input": "x"}, headers)
    assert whole.status == 400


def test_an_output_without_a_call_is_a_user_message(shared: Any) -> None:
    item = {
        "type": "function_call_output",
        "id": "fco_1",
        "output": "<codex_delegation>Count.</codex_delegation>",
    }
    assert messages_of(shared, R, {"input": [item, *HELLO]}) == [
        {"role": "user", "content": f"{item['output']}\nhello"}
    ]


@pytest.mark.parametrize("given", [{}, {"input": []}, {"input": None}])
def test_input_may_be_empty_after_other_messages(shared: Any, given: Json) -> None:
    assert messages_of(shared, R, {"instructions": "Greet.", **given}) == [
        {"role": "system", "content": "Greet."}
    ]
    first = shared.ask("POST", R, {"model": "toy", "input": "x", "max_output_tokens": 2}).json
    messages = messages_of(shared, R, {"previous_response_id": first["id"], **given})
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_an_item_with_an_id_alone_is_a_reference(shared: Any) -> None:
    first = shared.ask("POST", R, {"model": "toy", "input": "x", "max_output_tokens": 2}).json
    items = [{"id": first["output"][0]["id"]}, *HELLO]
    assert [each["content"] for each in messages_of(shared, R, {"input": items})] == [" t0 t1", "hello"]


def test_stored_input_has_patches_and_calls_of_chat_messages(shared: Any) -> None:
    operation = {"type": "update_file", "path": "a.py", "diff": "@@"}
    function = {"name": "f", "arguments": "{}"}
    items = [
        *HELLO,
        {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "d", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "d", "content": "4"},
        {"type": "agent_message", "author": "/root", "content": "Go."},
    ]
    whole = messages_of(shared, R, {"input": items})
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="toy", input=items, max_output_tokens=2)  # type: ignore[arg-type]
    followed = messages_of(shared, R, {"previous_response_id": first.id, "input": HELLO})
    assert followed[: len(whole)] == whole


def test_an_item_with_an_empty_type_is_a_message(shared: Any) -> None:
    assert messages_of(shared, R, {"input": [{"type": "", **HELLO[0]}]}) == HELLO


def test_all_values_of_include_are_accepted(shared: Any) -> None:
    for value in get_args(ResponseIncludable):
        prompt_of(shared, R, {"input": "x", "include": [value]})


def test_a_choice_of_programmatic_calling_is_no_choice(shared: Any) -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "programmatic_tool_calling"}]
    choice = {"type": "programmatic_tool_calling"}
    prompt = prompt_of(shared, R, {"input": "x", "tools": tools, "tool_choice": choice})
    assert [each["function"]["name"] for each in json.loads(prompt.tools)] == ["f"]


THOUGHTS = [[(int(Channel.REASONING), 0, "Räin?")], [(int(Channel.CONTENT), 0, "Yes.")]]


def test_reasoning_returns_in_its_encrypted_content(serve: Callable[..., Any]) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3"))
    server.engine.script = THOUGHTS
    body = {"model": "toy", "input": "x", "store": False}
    assert "encrypted_content" not in server.ask("POST", R, body).json["output"][0]
    body["include"] = ["reasoning.encrypted_content"]
    whole = server.ask("POST", R, body).json["output"]
    events = server.ask("POST", R, {**body, "stream": True}).events
    assert events[-1]["response"]["output"][0]["encrypted_content"] == whole[0]["encrypted_content"]
    stateless = [{**whole[0], "content": None}, whole[1]]
    (answer, _) = messages_of(server, R, {**body, "input": [*stateless, *HELLO]})
    assert (answer["reasoning_content"], answer["content"]) == ("Räin?", "Yes.")


@pytest.mark.parametrize("state", ["gAAAA==", "quintet-reasoning-1.?", "quintet-reasoning-1._w=="])
def test_encrypted_content_of_other_servers_is_ignored(shared: Any, state: str) -> None:
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": state,
    }
    (answer, _) = messages_of(shared, R, {"input": [item, *HELLO]})
    assert answer["reasoning_content"] == "hm"


def test_a_response_repeats_the_penalties(shared: Any) -> None:
    body = {"model": "toy", "input": "x", "max_output_tokens": 1}
    plain = shared.ask("POST", R, body).json
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0, 0)
    assert shared.ask("POST", R, {**body, "presence_penalty": 0.5}).json["presence_penalty"] == 0.5


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("high", True)])
def test_an_effort_turns_reasoning_on_or_off(shared: Any, effort: str, thinks: bool) -> None:
    switches = {"enable_thinking": thinks, "thinking": thinks}
    for path, body in (
        (H, {"messages": HELLO, "reasoning_effort": effort}),
        (R, {"input": HELLO, "reasoning": {"effort": effort}}),
    ):
        assert json.loads(prompt_of(shared, path, body).template_kwargs) == {
            "reasoning_effort": effort,
            **switches,
        }
    own = {"messages": HELLO, "reasoning_effort": effort, "chat_template_kwargs": {"thinking": not thinks}}
    used = json.loads(prompt_of(shared, H, own).template_kwargs)
    assert used == {"reasoning_effort": effort, "thinking": not thinks}


ON, OFF = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, OFF),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, {"reasoning_effort": "high", **OFF}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ON),
        ({"thinking": "disabled"}, OFF),
        ({"reasoning": {"enabled": False, "exclude": False}}, OFF),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", **ON}),
        ({"reasoning": True}, ON),
        ({"reasoning": {"max_tokens": 9}, "thinking": None}, {}),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_switches_of_other_servers_turn_reasoning_on_or_off(
    shared: Any, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    used = prompt_of(shared, H, {"messages": HELLO, **fields}).template_kwargs
    assert json.loads(used or b"{}") == expected


def test_disabled_thinking_takes_precedence_over_an_effort(shared: Any) -> None:
    body = {"messages": HELLO, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    used = json.loads(prompt_of(shared, M, body).template_kwargs)
    assert used == {"reasoning_effort": "high", "enable_thinking": False, "thinking": False}


def test_codex_reads_the_list_of_models(shared: Any) -> None:
    plain = shared.ask("GET", "/v1/models").json
    assert shared.ask("GET", "/v1/models?client_version=0.153.4").json == {**plain, "models": []}
