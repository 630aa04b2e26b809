"""Requests of coding agents: tools and items of every type, tool search, late system messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quintet.deploy.router import request_summary
from quintet.frontend.api.responses.output import CallForm
from quintet.frontend.api.responses.parse import chat_body, items_of
from quintet.frontend.api.responses.types import ResponsesBody
from quintet.wire.channels import Channel
from quintet.wire.chat import decode_messages
from quintet.wire.config import ParsersConfig
from quintet.wire.messages import ChatPrompt, Submit
from tests.http_api.chat_prompts import H, M, R, prompt_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NAME, ARGUMENTS = int(Channel.NAME), int(Channel.ARGUMENTS)
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FLAT = {"type": "function", "name": "read", "description": "Read a file.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {"name": "list", "parameters": SCHEMA}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
ANTHROPIC = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}

Json = dict[str, Any]


@pytest.fixture
def parsing(serve: Callable[..., Any]) -> Any:
    return serve(parsers=ParsersConfig(tools="hermes"))


def functions(prompt: ChatPrompt) -> dict[str, Json]:
    """Return the functions in the template's tools, by name."""
    tools = json.loads(prompt.tools) if prompt.tools else []
    assert all(tool["type"] == "function" for tool in tools)
    return {tool["function"]["name"]: tool["function"] for tool in tools}


# --- tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [H, R])
def test_functions_of_any_form_are_nested_for_the_template(shared: Any, path: str) -> None:
    messages = {"messages" if path == H else "input": HELLO}
    prompt = prompt_of(shared, path, {**messages, "tools": [FLAT, NESTED, {**ANTHROPIC, "name": "edit"}]})
    found = functions(prompt)
    assert list(found) == ["read", "list", "edit"]
    assert all(function["parameters"] == SCHEMA for function in found.values())


def test_tools_that_need_no_change_reach_the_template_as_they_were_sent(shared: Any) -> None:
    prompt = prompt_of(shared, H, {"messages": HELLO, "tools": [{**NESTED, "cache_control": {}}]})
    assert json.loads(prompt.tools) == [{**NESTED, "cache_control": {}}]


@pytest.mark.parametrize("path", [H, R, M])
def test_an_empty_tool_list_is_no_tools(shared: Any, path: str) -> None:
    messages = {"input" if path == R else "messages": HELLO}
    assert prompt_of(shared, path, {**messages, "tools": []}).tools == b""


def test_a_freeform_tool_is_a_function_of_one_text(shared: Any) -> None:
    custom = {"type": "custom", "custom": {name: PATCH[name] for name in ("name", "description", "format")}}
    for path, body in ((R, {"input": "x", "tools": [PATCH]}), (H, {"messages": HELLO, "tools": [custom]})):
        function = functions(prompt_of(shared, path, body))["apply_patch"]
        assert function["parameters"]["required"] == ["input"]
        assert "start: /.+/" in function["parameters"]["properties"]["input"]["description"]


def test_a_namespace_is_functions_of_joined_names(shared: Any) -> None:
    space = {"type": "namespace", "name": "mcp__db", "tools": [FLAT, PATCH]}
    found = functions(prompt_of(shared, R, {"input": "x", "tools": [FLAT, space]}))
    assert list(found) == ["read", "mcp__db__read", "mcp__db__apply_patch"]


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (R, {"type": "web_search", "external_web_access": False}),
        (R, {"type": "image_generation", "output_format": "png"}),
        (R, {"type": "tool_search"}),
        (R, {"type": "mcp", "server_label": "x", "server_url": "https://example.com"}),
        (R, {"type": "code_interpreter", "container": {"type": "auto"}}),
        (R, {"type": "browser"}),
        (R, {"type": "x:web_search", "parameters": {"max_results": 3}}),
        (M, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}),
        (M, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}),
        (M, {"type": "mcp_toolset", "mcp_server_name": "x"}),
        (M, {"type": "robot_20300101", "name": "robot"}),
    ],
)
def test_hosted_tools_are_skipped(
    shared: Any, caplog: pytest.LogCaptureFixture, path: str, tool: Json
) -> None:
    messages = {"input": "x"} if path == R else {"messages": HELLO}
    own = FLAT if path == R else ANTHROPIC
    with caplog.at_level(logging.INFO, "quintet"):
        assert list(functions(prompt_of(shared, path, {**messages, "tools": [own, tool]}))) == ["read"]
    assert caplog.text.count(f"of type '{tool['type']}'") == 1
    choice = {"type": "tool", "name": tool.get("name", "x")} if path == M else "required"
    prompt = prompt_of(shared, path, {**messages, "tools": [tool], "tool_choice": choice})
    assert prompt.tools == b""


def test_a_tool_of_an_unknown_type_with_a_schema_is_a_function(shared: Any) -> None:
    tool = {**FLAT, "type": "client_tool", "name": "look"}
    assert functions(prompt_of(shared, R, {"input": "x", "tools": [tool]}))["look"]["parameters"] == SCHEMA


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_anthropic_client_tools_are_functions(shared: Any, kind: str) -> None:
    tools = [{"type": kind, "name": "mine"}]
    assert (
        "command"
        in functions(prompt_of(shared, M, {"messages": HELLO, "tools": tools}))["mine"]["parameters"][
            "properties"
        ]
    )


# --- past calls -------------------------------------------------------------------------------------------------------


def test_calls_have_the_item_types_of_their_tools(parsing: Any) -> None:
    search = {"type": "tool_search", "execution": "client", "parameters": SCHEMA, "description": "Find."}
    space = {"type": "namespace", "name": "mcp__db", "description": "", "tools": [FLAT]}
    calls = [
        ("apply_patch", '{"input": "*** Begin\\n"}'),
        ("local_shell", '{"command": ["ls"], "workdir": "/x"}'),
        ("mcp__db__read", '{"path": "a"}'),
        ("tool_search", '{"query": "issues"}'),
        ("read", "{}"),
    ]
    parsing.engine.script = [
        [(NAME, i, name), (ARGUMENTS, i, arguments)] for i, (name, arguments) in enumerate(calls)
    ]
    body = {"model": "toy", "input": "x", "tools": [FLAT, PATCH, {"type": "local_shell"}, space, search]}
    events = parsing.ask("POST", R, {**body, "stream": True}).events
    for event in events:
        EVENT.validate_python(event)
    streamed = events[-1]["response"]
    whole = parsing.ask("POST", R, body).json
    for response in (whole, streamed):
        patch, shell, read, found, plain = response["output"]
        assert (patch["type"], patch["name"], patch["input"]) == (
            "custom_tool_call",
            "apply_patch",
            "*** Begin\n",
        )
        assert shell["type"] == "local_shell_call" and shell["action"]["command"] == ["ls"]
        assert shell["action"]["working_directory"] == "/x"
        assert (read["type"], read["namespace"], read["name"]) == ("function_call", "mcp__db", "read")
        assert (found["type"], found["execution"]) == ("tool_search_call", "client")
        assert found["arguments"] == {"query": "issues"}
        assert (plain["type"], plain["name"], "namespace" in plain) == ("function_call", "read", False)
        assert response["status"] == "completed"
    kinds = [event["type"] for event in events]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert kinds.count("response.function_call_arguments.done") == 2
    replayed = parsing.ask("GET", f"{R}/{streamed['id']}?stream=true").events
    done = [
        [e["item"] for e in each if e["type"] == "response.output_item.done"] for each in (events, replayed)
    ]
    assert done[0] == done[1] == streamed["output"]
    Response.model_validate(whole)

    assert_results_follow(parsing, whole, calls, body["tools"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin"}', "*** Begin"),
        ('{"patch": "*** Begin"}', "*** Begin"),
        ('"*** Begin"', "*** Begin"),
        ('{"command": ["apply_patch", "*** Begin"]}', "*** Begin"),
        ('{"command": ["ls", "x"]}', '{"command": ["ls", "x"]}'),
        ('{"path": "a", "patch": "*** Begin"}', '{"path": "a", "patch": "*** Begin"}'),
        ('{"input": "*** Be', '{"input": "*** Be'),
        ("{}", "{}"),
    ],
)
def test_the_input_of_a_freeform_tool_is_read_in_every_form(arguments: str, text: str) -> None:
    assert CallForm("custom", "apply_patch").item("c", arguments)["input"] == text


def assert_results_follow(parsing: Any, whole: Json, calls: list[tuple[str, str]], tools: list[Json]) -> None:
    """Send results of calls, and check that the template gets the calls as the model wrote them."""
    parsing.engine.script = [[(int(Channel.CONTENT), 0, "Done.")]]
    follow = {"previous_response_id": whole["id"], "tools": tools}
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "fine"}
        for item in whole["output"]
        if item["type"] != "tool_search_call"
    ]
    messages = decode_messages(prompt_of(parsing, R, {**follow, "input": results}).messages)
    past_calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in messages[1]["tool_calls"]
    ]
    assert past_calls == [(name, json.loads(arguments)) for name, arguments in calls]
    assert [message["name"] for message in messages[2:]] == [
        "apply_patch",
        "local_shell",
        "mcp__db__read",
        "read",
    ]


def test_shell_and_apply_patch_have_item_types(parsing: Any) -> None:
    operation = {"type": "update_file", "path": "a.py", "diff": "@@\n-x\n+y"}
    calls = [("shell", {"commands": ["ls", "pwd"]}), ("apply_patch", operation)]
    parsing.engine.script = [
        [(NAME, i, name), (ARGUMENTS, i, json.dumps(arguments))] for i, (name, arguments) in enumerate(calls)
    ]
    tools = [{"type": "shell"}, {"type": "apply_patch"}]
    whole = parsing.ask("POST", R, {"model": "toy", "input": "x", "tools": tools}).json
    shell, patch = whole["output"]
    assert (shell["type"], shell["action"]["commands"]) == ("shell_call", ["ls", "pwd"])
    assert (patch["type"], patch["operation"]) == ("apply_patch_call", operation)
    Response.model_validate(whole)

    parsing.engine.script = [[(int(Channel.CONTENT), 0, "Done.")]]
    outcome = {"type": "exit", "exit_code": 1}
    output = [{"stdout": "a.py\n", "stderr": "", "outcome": outcome}, {"stdout": "/x", "stderr": "slow"}]
    results = [
        {"type": "shell_call_output", "call_id": shell["call_id"], "output": output},
        {"type": "apply_patch_call_output", "call_id": patch["call_id"], "status": "failed"},
    ]
    follow = {"previous_response_id": whole["id"], "tools": tools, "input": results}
    messages = decode_messages(prompt_of(parsing, R, follow).messages)
    past_calls = [call["function"] for call in messages[1]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in past_calls] == calls
    assert [message["content"] for message in messages[2:]] == ["a.py\n[exit code 1]\n/x\nslow", "failed"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "shell_call", "call_id": "c"}, "input[1].action"),
        ({"type": "apply_patch_call", "call_id": "c", "operation": 3}, "input[1].operation"),
        ({"type": "apply_patch_call_output", "call_id": "c"}, "input[1].status"),
    ],
)
def test_incomplete_items_of_shell_and_apply_patch_are_refused(shared: Any, item: Json, param: str) -> None:
    reply = shared.ask("POST", R, {"model": "toy", "input": [*HELLO, item]})
    assert reply.status == 400 and param in reply.json["error"]["message"]


def test_items_of_hosted_tools_are_dropped(shared: Any, caplog: pytest.LogCaptureFixture) -> None:
    items = [
        *HELLO,
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "item_of_a_newer_version", "content": None},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"role": "user", "content": "continue"},
    ]
    with caplog.at_level(logging.INFO, "quintet"):
        prompt = prompt_of(shared, R, {"input": items, "store": False})
    assert decode_messages(prompt.messages) == [{"role": "user", "content": "hello\ncontinue"}]
    assert "input[1], an item of type 'web_search_call', was skipped" in caplog.text


def test_a_part_in_place_of_an_item_is_refused(shared: Any) -> None:
    reply = shared.ask("POST", R, {"model": "toy", "input": [{"type": "input_text", "text": "x"}]})
    assert reply.status == 400 and "input[0] is a part of type 'input_text'" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("output", "content"),
    [
        (None, ""),
        ({"a": 1}, '{"a":1}'),
        ([{"text": "x"}], "x"),
        ("", ""),
        (["x", {"a": 1}], 'x\n{"a":1}'),
        ([{"type": "input_image", "image_url": "data:,"}], "[image omitted: this model reads text only]"),
    ],
)
def test_results_of_any_form_are_text(shared: Any, output: Any, content: str) -> None:
    items = [
        {"type": "function_call", "call_id": "c", "name": "f"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    call, result = decode_messages(prompt_of(shared, R, {"input": [*HELLO, *items]}).messages)[1:]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert result["content"] == content


def test_messages_in_the_format_of_chat_completions_are_accepted(shared: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    messages = decode_messages(prompt_of(shared, R, {"input": turns}).messages)
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert messages[2] == {"role": "tool", "tool_call_id": "c", "name": "f", "content": "4"}


def test_hosted_calls_become_calls_with_results(shared: Any) -> None:
    call = {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "x",
        "name": "f",
        "arguments": "{}",
        "output": "4",
    }
    messages = decode_messages(prompt_of(shared, R, {"input": [*HELLO, call]}).messages)
    assert messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert messages[2] == {"role": "tool", "tool_call_id": "mcp_1", "name": "f", "content": "4"}


def test_tools_found_by_a_search_are_in_its_result_and_callable(parsing: Any) -> None:
    tools = [FLAT, {**FLAT, "name": "later", "defer_loading": True}]
    items = [
        *HELLO,
        {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "x"}},
        {
            "type": "tool_search_output",
            "call_id": "c1",
            "execution": "client",
            "tools": [{**FLAT, "name": "found"}],
        },
    ]
    prompt = prompt_of(parsing, R, {"input": items, "tools": tools})
    assert list(functions(prompt)) == ["read"]
    result = decode_messages(prompt.messages)[-1]
    assert result["role"] == "tool" and json.loads(result["content"])["function"]["name"] == "found"


def added(name: str) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": [{**FLAT, "name": name}]}


def test_tools_of_the_first_items_are_added_to_the_request_tools(shared: Any) -> None:
    space = {"type": "namespace", "name": "functions", "tools": [PATCH]}
    first = {"type": "additional_tools", "tools": [space]}
    items = [first, added("more"), {"role": "developer", "content": "Help."}, *HELLO]
    prompt = prompt_of(shared, R, {"input": items, "tools": [FLAT]})
    assert list(functions(prompt)) == ["read", "functions__apply_patch", "more"]
    assert [message["role"] for message in decode_messages(prompt.messages)] == ["developer", "user"]
    named = {"type": "function", "name": "more"}
    assert functions(prompt_of(shared, R, {"input": items, "tool_choice": named})).keys() >= {"more"}


def test_tools_added_later_are_system_messages(shared: Any) -> None:
    prompt = prompt_of(shared, R, {"input": [*HELLO, added("later"), *HELLO], "tools": [FLAT]})
    assert list(functions(prompt)) == ["read"], "the first part of the prompt does not change"
    _, message, _ = decode_messages(prompt.messages)
    assert message["role"] == "system"
    assert json.loads(message["content"].split("\n", 1)[1])["function"]["name"] == "later"


# --- Anthropic's blocks -------------------------------------------------------------------------------------------


def test_deferred_tools_are_shown_at_their_references(shared: Any) -> None:
    tools = [
        ANTHROPIC,
        {**ANTHROPIC, "name": "later", "defer_loading": True},
        {"name": "bare", "defer_loading": True},
    ]
    call = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "x"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("later", "read", "unknown")]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": [{"type": "text", "text": "More:"}, added]},
    ]
    prompt = prompt_of(shared, M, {"messages": turns, "tools": tools})
    assert list(functions(prompt)) == ["read"]
    *_, message, system = decode_messages(prompt.messages)
    definition, *others = message["content"].split("\n")
    assert others == ["Tool available: read", "Tool available: unknown"]
    function = {"name": "later", "description": "Read a file.", "parameters": SCHEMA}
    assert json.loads(definition.removeprefix("Tool available: ")) == {
        "type": "function",
        "function": function,
    }
    assert system == {"role": "system", "content": f"More:\n{definition}"}
    assert prompt.message_names == ["messages[0]", "messages[1]", "messages[2]", "messages[3]"]


def test_deferred_tools_are_shown_immediately_with_a_hosted_search(shared: Any) -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    tools = [search, {**ANTHROPIC, "defer_loading": True}]
    assert list(functions(prompt_of(shared, M, {"messages": HELLO, "tools": tools}))) == ["read"]


def test_blocks_of_hosted_tools_are_dropped(shared: Any) -> None:
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [{"type": "web_search_result"}],
        },
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {"type": "tool_search_tool_search_result", "tool_references": []},
        },
        {"type": "block_of_a_newer_version", "text": "x"},
        {"type": "text", "text": "Found."},
    ]
    turns = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
    messages = decode_messages(prompt_of(shared, M, {"messages": turns}).messages)
    assert messages[1] == {"role": "assistant", "content": "I search.\nFound."}
    found = {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "c"}]}
    messages = decode_messages(
        prompt_of(shared, M, {"messages": [{"role": "user", "content": [found]}]}).messages
    )
    assert messages[0]["content"] == "T\nu\nc"


def test_a_document_of_blocks_is_text(shared: Any) -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    turns = [{"role": "user", "content": [{"type": "document", "title": "T", "source": source}]}]
    messages = decode_messages(prompt_of(shared, M, {"messages": turns}).messages)
    assert messages[0]["content"] == "T\na\nb"


@pytest.mark.parametrize(("given", "arguments"), [({}, {}), (None, {}), ("{", "{"), ([1], [1])])
def test_invalid_input_of_a_past_call_is_accepted(shared: Any, given: Any, arguments: Any) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": given}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    messages = decode_messages(prompt_of(shared, M, {"messages": turns}).messages)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("as_text", [True, False])
def test_the_billing_header_is_removed_from_the_prompt(shared: Any, as_text: bool) -> None:
    def body(hash_: str) -> Json:
        line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={hash_};"
        blocks = [{"type": "text", "text": text} for text in (line, "You help." + 500 * " Yes.")]
        system = "\n".join(block["text"] for block in blocks) if as_text else blocks
        return {"messages": HELLO, "system": system}

    first, second = (prompt_of(shared, M, body(each)) for each in ("01c", "ff2"))
    assert first == second
    assert decode_messages(first.messages)[0]["content"].startswith("You help.")
    names = [request_summary.read(json.dumps(body(each)).encode(), "").names for each in ("01c", "ff2")]
    assert names[0] == names[1] != []


# --- roles and forms ----------------------------------------------------------------------------------------------


def test_system_messages_are_the_same_in_all_dialects(shared: Any) -> None:
    turns = [HELLO[0], {"role": "system", "content": "late"}, HELLO[0]]
    chat = prompt_of(shared, H, {"messages": [{"role": "system", "content": "first"}, *turns]})
    anthropic = prompt_of(shared, M, {"system": "first", "messages": turns})
    responses = prompt_of(shared, R, {"instructions": "first", "input": turns})
    assert (
        decode_messages(chat.messages)
        == decode_messages(anthropic.messages)
        == decode_messages(responses.messages)
    )
    assert anthropic.message_names == ["system", "messages[0]", "messages[1]", "messages[2]"]
    assert responses.message_names == ["instructions", "input[0]", "input[1]", "input[2]"]


def test_item_indexes_of_a_continued_conversation_exclude_its_history(shared: Any) -> None:
    first = shared.ask("POST", R, {"model": "toy", "input": "x", "max_output_tokens": 2}).json
    prompt = prompt_of(shared, R, {"previous_response_id": first["id"], "input": HELLO})
    assert prompt.message_names == [
        "item 0 of the conversation so far",
        "item 1 of the conversation so far",
        "input[0]",
    ]


@pytest.mark.parametrize(
    ("choice", "known"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "none", "function": {"name": ""}}, "none"),
        ({"type": "any", "disable_parallel_tool_use": False}, "required"),
        ({"type": "function", "name": "list"}, {"type": "function", "function": {"name": "list"}}),
        ({"type": "tool", "name": "list"}, {"type": "function", "function": {"name": "list"}}),
        ({"function": {"name": "list"}}, {"type": "function", "function": {"name": "list"}}),
        ("any", "required"),
    ],
)
def test_tool_choices_of_other_dialects_are_accepted(parsing: Any, choice: Any, known: Any) -> None:
    specs = []
    for each in (choice, known):
        prompt_of(parsing, H, {"messages": HELLO, "tools": [NESTED], "tool_choice": each})
        specs.append(parsing.engine.wait_for(Submit)[-1].spec)
    assert specs[0].params.structured_outputs == specs[1].params.structured_outputs
    assert specs[0].parsing == specs[1].parsing


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_hide_the_others(parsing: Any, mode: str) -> None:
    tools = [NESTED, FLAT, {"type": "custom", "custom": {"name": "patch"}}]
    names = [
        {"type": "function", "function": {"name": "read"}},
        {"type": "custom", "custom": {"name": "patch"}},
    ]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    prompt = prompt_of(parsing, H, {"messages": HELLO, "tools": tools, "tool_choice": choice})
    assert list(functions(prompt)) == ["read", "patch"]
    form = parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs
    assert (form is not None) == (mode == "required")
    choice["allowed_tools"] = {"mode": mode, "tools": [{"type": "function", "function": {"name": "absent"}}]}
    reply = parsing.ask("POST", H, {"model": "toy", "messages": HELLO, "tools": tools, "tool_choice": choice})
    assert reply.status == 400 and "names 'absent'" in reply.json["error"]["message"]


def test_responses_accept_a_named_function_of_chat_completions(parsing: Any) -> None:
    choice = {"type": "function", "function": {"name": "read"}}
    prompt_of(parsing, R, {"input": "x", "tools": [FLAT], "tool_choice": choice})
    assert parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs is not None


@pytest.mark.parametrize("name", ["café", "工具"])
def test_a_call_of_a_function_with_any_letters_can_be_required(parsing: Any, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    prompt_of(parsing, H, {"messages": HELLO, "tools": [tool], "tool_choice": "required"})
    form = parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs
    assert form is not None and name in form.structural_tag


@pytest.mark.parametrize("path", [f"{H}/render", f"{H}/batch"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read"}}])
def test_tool_choice_accepts_flat_tools_in_render_and_batch(shared: Any, path: str, choice: Any) -> None:
    messages = [HELLO] if path.endswith("batch") else HELLO
    body = {"model": "toy", "messages": messages, "tools": [FLAT, NESTED], "tool_choice": choice}
    reply = shared.ask("POST", path, {**body, "max_tokens": 4})
    assert reply.status == 200, reply.json


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "list"}}])
def test_required_calls_take_precedence_over_response_format(parsing: Any, choice: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    plain = {"messages": HELLO, "tools": [NESTED], "tool_choice": choice}
    prompt_of(parsing, H, plain)
    expected = parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs
    prompt_of(parsing, H, {**plain, "response_format": form})
    assert parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs == expected
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    own = choice if isinstance(choice, str) else {"type": "function", "name": "list"}
    body = {"input": "x", "tools": [{**FLAT, "name": "list"}], "tool_choice": own}
    prompt_of(parsing, R, {**body, "text": text})
    assert parsing.engine.wait_for(Submit)[-1].spec.params.structured_outputs == expected


@pytest.mark.parametrize(
    ("kind", "choice"), [("auto", "auto"), ("none", "none"), ("any", "required"), ("required", "required")]
)
def test_objects_with_a_type_are_tool_choices_of_responses(kind: str, choice: str) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    sent = {"input": "x", "tools": [tool], "tool_choice": {"type": kind}}
    body = msgspec.json.decode(json.dumps(sent), type=ResponsesBody)
    assert chat_body(body, items_of(body))[0].tool_choice == choice
