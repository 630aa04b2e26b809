"""Roles in chat templates: developer, system messages that a template refuses or drops, call ids."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.text.template_shapes import GENERATE, SHAPES, SYSTEM_FIRST, TOOL, USER, turns

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.wire.chat import encode_messages
from quintet.wire.errors import RequestError
from quintet.wire.messages import ChatPrompt

LAX = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + GENERATE
STRICT = turns(USER, system=SYSTEM_FIRST, other=TOOL + "{%- else -%}{{ raise_exception('unknown role') }}")
NO_SYSTEM = SHAPES["gemma"].source
ALTERNATING = SHAPES["llama 2"].source

Message = dict[str, Any]


def chat(*turns: str) -> list[Message]:
    """Return messages of these texts. The first letter of a text selects its role."""
    roles = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    return [{"role": roles[text[0]], "content": text} for text in turns]


def render(template: str, messages: list[Message], **fields: Any) -> str:
    templates = ChatTemplates({"default": template}, {})
    return templates.render(ChatPrompt(encode_messages(messages), **fields))


def test_developer_becomes_system_unless_the_template_supports_it() -> None:
    messages = chat("d1", "u1")
    assert render(LAX, messages) == "[system]d1[user]u1[A]"
    assert render(STRICT, messages) == "[S]d1[/S][U]u1[/U][A]"
    with_developer = LAX.replace("{% for", "{% if messages[0].role == 'developer' %}D{% endif %}{% for")
    assert render(with_developer, messages) == "D[developer]d1[user]u1[A]"


def test_supported_messages_are_unchanged() -> None:
    assert (
        render(LAX, chat("s1", "s2", "u1", "s3", "u2")) == "[system]s1[system]s2[user]u1[system]s3[user]u2[A]"
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("s1", "s2", "u1"), "[S]s1\n\ns2[/S][U]u1[/U][A]"),
        (chat("u1", "s1", "u2"), "[U]u1[/U][U]s1[/U][U]u2[/U][A]"),
        (chat("s1", "u1", "a1", "s2"), "[S]s1[/S][U]u1[/U][A]a1[/A][U]s2[/U][A]"),
        (chat("s1", "d1", "u1", "d2", "u2"), "[S]s1\n\nd1[/S][U]u1[/U][U]d2[/U][U]u2[/U][A]"),
    ],
)
def test_late_system_messages_become_user_turns_if_system_must_be_first(
    messages: list[Message], expected: str
) -> None:
    assert render(STRICT, messages) == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("s1", "u1"), ["s1\n\nu1"]),
        (chat("s1", "s2", "u1"), ["s1\n\ns2\n\nu1"]),
        (chat("u1", "s1", "u2", "a1", "s2", "u3"), ["u1\n\ns1\n\nu2", "a1", "s2\n\nu3"]),
        (chat("u1", "a1", "s1"), ["u1", "a1", "s1"]),
        (chat("s1"), ["s1"]),
        (chat("s1", "a1", "u1"), ["s1", "a1", "u1"]),
    ],
)
def test_system_messages_are_merged_into_strictly_alternating_turns(
    messages: list[Message], expected: list[str]
) -> None:
    text = render(NO_SYSTEM, messages).removesuffix("[A]")
    assert [turn.partition("\n")[2] for turn in text.split("<e>")[:-1]] == expected


def test_a_late_system_message_that_the_template_drops_becomes_a_user_turn() -> None:
    dropping = turns(USER, system="{% if loop.first %}[S]{{ m.content }}[/S]{% endif %}")
    assert render(dropping, chat("s1", "u1", "a1", "s2", "u2")) == (
        "[S]s1[/S][U]u1[/U][A]a1[/A][U]s2[/U][U]u2[/U][A]"
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("d1", "u1"), "[D]d1[/D]<user>u1[A]"),
        (chat("s1", "d1", "u1"), "[D]s1\n\nd1[/D]<user>u1[A]"),
        (chat("d1", "u1", "a1", "d2", "u2"), "[D]d1[/D]<user>u1<final>a1<user>d2<user>u2[A]"),
    ],
)
def test_a_late_developer_message_that_the_template_drops_is_kept(
    messages: list[Message], expected: str
) -> None:
    assert render(SHAPES["gpt-oss"].source, messages) == expected


def test_a_developer_message_that_the_template_drops_becomes_a_system_message() -> None:
    dropping = turns(USER, before="{% set last = ['user', 'developer'] %}")
    assert render(dropping, chat("d1", "u1")) == "[S]d1[/S][U]u1[/U][A]"


@pytest.mark.parametrize(
    ("later", "result"),
    [
        (chat("s2"), "out\n\ns2"),
        (chat("u2"), "out\n\nu2"),
        (chat("u2", "a2", "u3"), "out\n\nu2"),
        (chat("s2", "u2"), "out\n\ns2\n\nu2"),
        (chat("u2", "u3"), "out\n\nu2\n\nu3"),
    ],
)
def test_messages_after_a_tool_result_are_merged_into_it_if_necessary(
    later: list[Message], result: str
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *chat("s1", "u1"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "out"},
        *later,
    ]
    assert f":{result}[/RESULT]" in render(SHAPES["mistral 0.3"].source, messages)
    kept = [*chat("s1", "u1", "a1"), messages[3], *later]
    assert render(LAX, kept).startswith("[system]s1[user]u1[assistant]a1[tool]out[")


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "abcdef123"}]}
NO_RESULT = "[no result: the call was interrupted]"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (chat("u1", "u2", "a1", "u3"), "[I]u1\n\nu2[/I]a1</s>[I]u3[/I]"),
        (chat("s1", "u1", "u2", "s2", "u3"), "[I]s1\n\nu1\n\nu2\n\ns2\n\nu3[/I]"),
        (chat("u1", "a1", "a2", "u2"), "[I]u1[/I]a1\n\na2</s>[I]u2[/I]"),
        ([*chat("u1"), {"role": "assistant", "content": ""}, *chat("u2")], "[I]u1[/I]</s>[I]u2[/I]"),
        ([*chat("u1", "u2"), {"role": "assistant", "content": ""}, *chat("u3")], "[I]u1\n\nu2\n\nu3[/I]"),
        (
            [*chat("u1"), CALLED, *chat("u2")],
            f'[I]u1[/I][CALLS] [{{"name": "f", "arguments": {{}}, "id": "abcdef123"}}]'
            f"[RESULT]abcdef123:{NO_RESULT}\n\nu2[/RESULT]",
        ),
    ],
)
def test_interrupted_turns_alternate_for_a_template_that_accepts_no_others(
    messages: list[Message], expected: str
) -> None:
    assert render(SHAPES["mistral 0.3"].source, messages).removesuffix("[A]") == expected
    assert render(LAX, messages).count("]") == 1 + len(messages)


def test_an_answer_of_reasoning_alone_is_text_in_alternating_turns() -> None:
    answer = "{% if not m.content %}{{ raise_exception('empty answer') }}{% endif %}[A]{{ m.content }}[/A]"
    source = ALTERNATING[: ALTERNATING.index("{%- if messages[0]")] + turns(USER, answer)
    messages = [*chat("u1", "u2"), {"role": "assistant", "content": None, "reasoning": "hm"}, *chat("u3")]
    assert render(source, messages) == "[U]u1\n\nu2[/U][A]hm[/A][U]u3[/U][A]"


def test_parts_are_merged_as_parts() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s1"}]},
        {"role": "system", "content": "s2"},
        *chat("u1"),
    ]
    assert "[S]s1s2[/S]" in render(SHAPES["qwen 3.5"].source, messages)


def test_a_template_error_names_the_message_of_the_client() -> None:
    names = ["system", "messages[0]", "messages[1].content[2]"]
    refusing = "{% if m.content == 'u2' %}{{ raise_exception('refused') }}{% endif %}" + USER
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[2\], of role 'user'") as caught:
        render(turns(refusing), chat("s1", "a1", "u2"), message_names=names)
    assert caught.value.param == "messages[1].content[2]"


def test_ids_of_calls_fit_a_template_that_restricts_them() -> None:
    def texts(*ids: str | None) -> str:
        calls = [
            {"type": "function", "function": {"name": "f", "arguments": "{}"}}
            | ({"id": each} if each else {})
            for each in ids
        ]
        results = [
            {"role": "tool", "content": "x"} | ({"tool_call_id": each} if each else {}) for each in ids
        ]
        messages = [*chat("u1"), {"role": "assistant", "tool_calls": calls}, *results]
        return render(SHAPES["mistral 0.3"].source, messages)

    kept = texts("abcDEF123")
    assert '"id": "abcDEF123"' in kept and "[RESULT]abcDEF123:" in kept
    for ids in (("call_0123456789", "toolu_1"), (None, None)):
        text = texts(*ids)
        made = [text.split('"id": "')[i][:9] for i in (1, 2)]
        assert made[0] != made[1]
        assert [text.split("[RESULT]")[i][:10] for i in (1, 2)] == [f"{each}:" for each in made]
    assert texts("call_0123456789") == texts("call_0123456789")


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        (["b", "a"], "a,b"),
        (["b", "a", "b"], "a,b,b"),
        (["c", "a"], "c,a"),
        ([None, "a"], "None,a"),
        (["b"], "b"),
    ],
)
def test_results_are_in_the_order_of_their_calls(results: list[str | None], shown: str) -> None:
    calls = [CALL | {"id": each} for each in ("a", "b")]
    messages = [
        *chat("u1"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each, "content": f"{each},"} for each in results),
        *chat("a1"),
    ]
    text = render(LAX.replace("[{{ m.role }}]", ""), messages)
    assert text == f"u1{shown},a1[A]"
    alone = [*chat("u1"), CALLED, *messages[2:]]
    assert render(LAX.replace("[{{ m.role }}]", ""), alone) == f"u1{','.join(map(str, results))},a1[A]"


def test_results_with_ids_of_other_types_keep_their_order() -> None:
    calls = [CALL | {"id": each} for each in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in ({}, ["a"])]
    assert render(LAX, [{"role": "assistant", "content": None, "tool_calls": calls}, *results])


@pytest.mark.parametrize("words", [("u1",), ("u1", "s1")])
def test_merging_takes_linear_time(words: tuple[str, ...]) -> None:
    """The same number of messages in ten conversations and in one; quadratic work takes ten times as long."""
    seconds = []
    for num_chats in (10, 1):
        messages = chat(*words) * (20_000 // num_chats)
        began_s = time.process_time()
        for _ in range(num_chats):
            text = render(STRICT, messages)
        seconds.append(time.process_time() - began_s)
        assert text.count(words[0]) == 20_000 // num_chats
    assert seconds[1] < 3 * seconds[0] + 0.5, seconds


KIMI_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.id }}<|tool_call_argument_begin|>{% endfor %}"
KIMI = turns(USER, KIMI_CALLS, "{%- elif m.role == 'tool' -%}<result>{{ m.tool_call_id }}")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (["functions.f:0", "functions.f:7"], ["functions.f:0", "functions.f:7"]),
        (["functions_f_0", "call_1a2b"], ["functions.f:0", "functions.f:1"]),
        (["functions.g:0", "functions.f:1"], ["functions.f:0", "functions.f:1"]),
        ([None, None], ["functions.f:0", "functions.f:1"]),
    ],
)
def test_ids_of_calls_name_the_function_for_kimi(sent: list[str | None], shown: list[str]) -> None:
    calls = [CALL | ({"id": each} if each else {}) for each in sent]
    results = [{"role": "tool", "content": "x"} | ({"tool_call_id": each} if each else {}) for each in sent]
    text = render(KIMI, [*chat("u1"), {"role": "assistant", "tool_calls": calls}, *results])
    assert [part.partition("<")[0] for part in text.split("<call>")[1:]] == shown
    assert [part.partition("[")[0] for part in text.split("<result>")[1:]] == shown
    for source in (KIMI, LAX):
        unknown = [*chat("u1"), {"role": "tool", "content": "x", "tool_call_id": "a"}]
        assert ("<result>a" in render(source, unknown)) == (source == KIMI)


@pytest.mark.parametrize(
    "content", ["{}\nYou help.", [{"type": "text", "text": "{}"}, {"type": "text", "text": "You help."}]]
)
def test_the_billing_header_line_is_removed(content: Any) -> None:
    def prompt(hash_: str) -> str:
        line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={hash_};"
        messages = [
            {"role": "system", "content": json.loads(json.dumps(content).replace("{}", line))},
            *chat("u1"),
        ]
        return render(LAX, messages)

    assert prompt("01c") == prompt("ff2") == "[system]You help.[user]u1[A]"


def test_text_and_reasoning_with_calls_are_joined_for_a_template_with_one_field() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    text = render(SHAPES["gpt-oss"].source, [*chat("u1"), message, result])
    assert text == '<user>u1<analysis>hm\n\nI look.<to=f>{}<f>"4"[A]'


def test_an_answer_of_reasoning_alone_has_text_for_a_template_that_accepts_no_empty_answer() -> None:
    answer = "{% if not m.content %}{{ raise_exception('empty answer') }}{% endif %}[A]{{ m.content }}[/A]"
    messages = [*chat("u1"), {"role": "assistant", "content": None, "reasoning": "hm"}, *chat("u2")]
    assert render(turns(USER, answer), messages) == "[U]u1[/U][A]hm[/A][U]u2[/U][A]"
    assert render(turns(USER), messages) == "[U]u1[/U][A][/A][U]u2[/U][A]"
