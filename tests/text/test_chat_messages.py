"""Normalized messages: traits of templates, contents, reasoning, calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.text.template_shapes import SHAPES

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.template_environment import make_environment
from quintet.tokenizer_proc.template_syntax import traits_of
from quintet.wire.chat import encode_messages
from quintet.wire.config import ChatContentFormat
from quintet.wire.errors import RequestError
from quintet.wire.messages import ChatPrompt

DUMP = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


def render(
    template: str, message: dict[str, Any], content_format: ChatContentFormat = "auto", **fields: Any
) -> str:
    templates = ChatTemplates({"default": template}, {}, content_format)
    return templates.render(ChatPrompt(encode_messages([message]), **fields))


@pytest.mark.parametrize("name", SHAPES)
def test_the_content_format_is_read_from_the_syntax_tree(name: str) -> None:
    shape = SHAPES[name]
    traits = traits_of(make_environment().parse(shape.source))
    assert traits.content_format == ("string" if shape.content == "string" else "openai")
    assert traits.call_id_form == (9 if name == "mistral 0.3" else None)
    assert traits.has_thinking_parts == (name == "magistral")


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("{% set c = m.content %}{% for p in c %}{% endfor %}", "openai"),
        ("{% set c = m.get('content', '') %}{% for p in c %}{% endfor %}", "openai"),
        ("{% macro f(x) %}{% for p in x %}{% endfor %}{% endmacro %}{{ f(x=m['content']) }}", "openai"),
        ("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}", "openai"),
        ("{{ m.content[0]['text'] }}", "openai"),
        ("{{ (m.content | first).text }}", "openai"),
        ("{% for p in m.content[1:] %}{% endfor %}", "openai"),
        ("{% for p in m.content if p.type == 'text' %}{% endfor %}", "openai"),
        ("{% for line in m.content.split('x') %}{% endfor %}", "string"),
        ("{{ m.content[0] }}", "string"),
        ("{% for c in m.tool_calls %}{% endfor %}{{ m.content }}", "string"),
    ],
)
def test_uses_of_parts_are_detected(expression: str, found: str) -> None:
    tree = make_environment().parse("{% for m in messages %}" + expression + "{% endfor %}")
    assert traits_of(tree).content_format == found


def test_the_configured_content_format_overrides_the_detected_one() -> None:
    kind = (
        "{% for m in messages %}{{ 'text' if m.content is string else 'parts' }}{{ m.content }}{% endfor %}"
    )
    for content, auto in (("a\nb", "text"), (PARTS, "text")):
        message = {"role": "user", "content": content}
        assert render(kind, message) == f"{auto}a\nb"
        assert render(kind, message, "string") == "texta\nb"
        assert render(kind, message, "openai") == "partsa\nb"


def test_a_part_without_a_type_is_text() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert (
        render(template, {"role": "user", "content": [{"text": "a"}, {"type": "text", "text": "b"}]})
        == "a\nb"
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, IMAGE], "a\n[image omitted: this model reads text only]"),
        ({"temp": 3}, '{"temp":3}'),
        ([{"temp": 3}], '[{"temp":3}]'),
        (["a", {"temp": "é"}], 'a\n{"temp":"é"}'),
        ([{"text": "a"}], "a"),
        (
            [{"type": "file", "name": "a.py"}, {"type": "dir"}],
            '[{"type":"file","name":"a.py"},{"type":"dir"}]',
        ),
        ([{"type": "file", "url": "u"}], '[{"type":"file","url":"u"}]'),
        (["a", {"type": "profile"}], 'a\n{"type":"profile"}'),
        ([{"type": 3, "text": "a"}], '[{"type":3,"text":"a"}]'),
        ([{"type": "message", "text": "a", "user": "u"}], '[{"type":"message","text":"a","user":"u"}]'),
        ([[{"type": "text", "text": "a"}]], '[[{"type":"text","text":"a"}]]'),
        ([1, 2], "[1,2]"),
    ],
)
def test_the_content_of_a_tool_message_becomes_text(content: Any, text: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render(template, {"role": "tool", "tool_call_id": "c", "content": content}) == text


def test_text_replaces_the_image_of_a_tool_in_the_users_message_after_its_result() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    templates = ChatTemplates({"default": template}, {}, "auto")
    image = {"role": "user", "content": [{"type": "text", "text": "Attached:"}, IMAGE]}
    result = {"role": "tool", "tool_call_id": "c", "content": "see the next message"}
    text = "user: Attached:\n[image omitted: this model reads text only]\n"
    prompt = ChatPrompt(encode_messages([result, image, image]))
    assert templates.render(prompt) == f"tool: see the next message\n{text}{text}"
    answer = {"role": "assistant", "content": "Done."}
    with pytest.raises(RequestError, match=r"messages\[2\].content\[1\] has type 'image_url'"):
        templates.render(ChatPrompt(encode_messages([result, answer, image])))


def test_calls_and_reasoning_in_the_parts_of_an_answer_are_read_or_skipped() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    parts = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning_content", "reasoning_content": {"text": "x", "signature": "s"}},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "tool_call", "id": "c", "name": "f", "args": {}},
        {"type": "reasoning", "summary": []},
    ]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert render(template, {"role": "assistant", "content": parts, "tool_calls": calls}) == "hm|a"


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "tool-call", "toolCallId": "c", "toolName": "f", "input": {}},
    ],
)
def test_media_and_calls_only_in_the_parts_of_an_answer_are_not_lost(part: Any) -> None:
    content = [{"type": "text", "text": "a"}, part]
    with pytest.raises(RequestError, match=r"content\[1\]"):
        render(DUMP, {"role": "assistant", "content": content})


@pytest.mark.parametrize("content", [[IMAGE], {"temp": 3}, [{"temp": 3}], [[PARTS]], [3]])
def test_other_messages_with_media_or_data_are_rejected(content: Any) -> None:
    with pytest.raises(RequestError, match="content"):
        render(DUMP, {"role": "user", "content": content})


def test_the_error_for_an_image_has_the_words_that_agents_look_for() -> None:
    with pytest.raises(RequestError, match="not a multimodal model: it does not support image input"):
        render(DUMP, {"role": "user", "content": [IMAGE]})


def test_null_content_is_none_in_tests_and_empty_in_output() -> None:
    tests = "{{ c is none }}{{ c == none }}{{ c is string }}{{ c is iterable }}{{ not c }}|"
    tests += "{{ c }}{{ 'x' + c + 'y' }}{{ c | trim }}"
    template = "{% for m in messages %}{% set c = m.content %}" + tests + "{% endfor %}"
    expected = "TrueTrueFalseTrueTrue|xy"
    assert render(template, {"role": "assistant", "content": None}) == expected
    assert render(template, {"role": "assistant"}) == expected
    assert render(template, {"role": "assistant", "content": ""}) == "FalseFalseTrueTrueTrue|xy"
    assert render(template.replace(tests, "{{ c | tojson }}"), {"role": "assistant"}) == ""
    assert json.loads(render(DUMP, {"role": "assistant", "content": None})) == {
        "role": "assistant",
        "content": None,
    }


def test_arguments_are_an_object_or_text_as_the_template_uses_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    each = "{% for m in messages %}{% set a = m.tool_calls[0].function.arguments %}{}{% endfor %}"
    for use, expected in (
        ("{{ a }}", '{"a":1}'),
        ("{{ 'x' + a + 'y' }}", 'x{"a":1}y'),
        ("{{ 'x' ~ a }}", 'x{"a":1}'),
        ("{{ a | string | length }}", "7"),
        ("{{ a | tojson }}", '{"a": 1}'),
        ("{{ a.a }}{{ a['a'] }}{{ a is mapping }}{{ a is string }}", "11TrueFalse"),
        ("{% for k, v in a | items %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ m.tool_calls[0].function | tojson }}", '{"name": "f", "arguments": {"a": 1}}'),
    ):
        assert render(each.replace("{}", use), {"role": "assistant", "tool_calls": [call]}) == expected
    twice = {"type": "function", "function": {"name": "f", "arguments": json.dumps('{"a":1}')}}
    assert (
        render(each.replace("{}", "{{ a }}{{ a.a }}"), {"role": "assistant", "tool_calls": [twice]})
        == '{"a":1}1'
    )


def test_thinking_parts_are_nested_once() -> None:
    inner = {"type": "thinking", "thinking": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert json.loads(render(DUMP, {"role": "user", "content": [inner]}))["reasoning_content"] == "a\nb"
    for levels in (1, 400):
        part = inner
        for _ in range(levels):
            part = {"type": "thinking", "thinking": [part]}
        with pytest.raises(RequestError, match="must be a string") as caught:
            render(DUMP, {"role": "user", "content": [part]})
        assert caught.value.param == "messages[0].content[0].thinking[0].thinking"


@pytest.mark.parametrize("tool_calls", [[], None])
def test_empty_calls_are_removed(tool_calls: Any) -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "tool_calls": tool_calls,
        "refusal": None,
        "function_call": None,
    }
    assert json.loads(render(DUMP, message)) == {"role": "assistant", "content": "x"}


def test_calls_of_other_types_become_functions() -> None:
    names = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    names += "{% endfor %}"
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    assert render(names, old) == 'assistant{"name": "f", "arguments": {}}'
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert render(names, {"role": "assistant", "tool_calls": [custom]}) == (
        'assistant{"name": "patch", "arguments": {"input": "*** Begin"}}'
    )
    assert render(names, {"role": "function", "name": "f", "content": "1"}) == "tool"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "x"]},
        {"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {
            "content": "x",
            "reasoning_details": [{"type": "reasoning.text", "text": text} for text in ("h", "m")],
        },
        {"content": "x", "reasoning_content": "", "reasoning": "hm"},
        {"content": "x", "reasoning": "hm"},
        {"content": "x", "reasoning_content": "hm"},
        {"content": "x", "thinking": "hm"},
    ],
)
def test_reasoning_fields_of_all_names_are_passed(fields: dict[str, Any]) -> None:
    names = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}|{{ m.content }}{% endfor %}"
    assert render(names, {"role": "assistant", **fields}) == "hmhmhm|x"


def test_a_final_message_in_parts_is_continued() -> None:
    source = SHAPES["qwen vl"].source
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    message = {"role": "assistant", "content": PARTS}
    assert render(source, message, **fields) == "[A]ab"
    assert render(source, {"role": "assistant", "content": "ab"}, **fields) == "[A]ab"


def efforts(*known: str) -> str:
    """Return a template that rejects other reasoning efforts."""
    return (
        f"{{% if reasoning_effort is defined and reasoning_effort not in {list(known)} %}}"
        "{{ raise_exception('unknown effort ' ~ reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    )


@pytest.mark.parametrize(
    ("known", "sent", "used"),
    [
        (("low", "medium", "xhigh"), "high", "xhigh"),
        (("low", "medium", "xhigh"), "max", "xhigh"),
        (("low", "medium", "xhigh"), "low", "low"),
        (("none", "high"), "medium", "high"),
        (("none", "high"), "minimal", "none"),
        (("high", "no_think"), "none", "no_think"),
        (("deep",), "high", ""),
        (("deep",), "deep", "deep"),
    ],
)
def test_an_effort_that_the_template_rejects_becomes_the_nearest_one(
    known: tuple[str, ...], sent: str, used: str
) -> None:
    kwargs = json.dumps({"reasoning_effort": sent}).encode()
    message = {"role": "user", "content": "a"}
    assert render(efforts(*known), message, template_kwargs=kwargs) == f"{used}|a"


def test_the_error_of_a_template_names_the_effort_only_if_it_is_unknown() -> None:
    message = {"role": "user", "content": "a"}
    template = efforts("none", "high") + "{{ raise_exception('no messages') }}"
    with pytest.raises(RequestError, match="no messages"):
        render(template, message, template_kwargs=b'{"reasoning_effort":"low"}')
    with pytest.raises(RequestError, match="unknown effort deeper"):
        render(efforts("deep"), message, template_kwargs=b'{"reasoning_effort":"deeper"}')
