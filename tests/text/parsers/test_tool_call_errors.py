"""Tool calls with a model's usual errors: same result for any division, and no call is lost or invented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from quintet.detokenizer_proc.parsers.registry import build
from quintet.wire.channels import Channel

PROPERTIES = {
    "x": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "b": {"type": "BOOLEAN"},
    "t": {"type": "str"}, "u": {"type": ["STRING", "null"]}, "l": {"type": "list"}, "so": {"type": ["string", "object"]},
}  # fmt: skip
SCHEMAS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "parameters": {"properties": PROPERTIES}}}
        for name in ("f", "g")
    ]
).encode()

Output = tuple[list[tuple[str, Any]], str, str]
"""Calls with decoded arguments, content, reasoning."""


def read(parts: Sequence[str], tools: str, reasoning: str) -> Output:
    parser = build(reasoning, tools, SCHEMAS, "")
    deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish()
    texts = dict.fromkeys((Channel.CONTENT, Channel.REASONING), "")
    names, arguments = list[str](), list[str]()
    for channel, call, text in deltas:
        if channel is Channel.NAME:
            names.append(text)
            arguments.append("")
        elif channel is Channel.ARGUMENTS:
            arguments[call] += text
        else:
            texts[channel] += text
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    return calls, texts[Channel.CONTENT].strip(), texts[Channel.REASONING].strip()


def parse(text: str, tools: str, reasoning: str = "") -> Output:
    """Parse the output whole, in parts of five characters, and by character."""
    whole = read([text], tools, reasoning)
    for size in (1, 5):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(parts, tools, reasoning) == whole
    return whole


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def harmony(arguments: str) -> str:
    return f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}<|call|>"


def kimi(arguments: str) -> str:
    return f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", hermes('{"s": "%s"}')),
        ("hermes", '<tool_call>{"arguments": {"s": "%s"}, "name": "f"}</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "%s"}'),
        ("llama3_json", '{"name": "f", "parameters": {"s": "%s"}}'),
        ("kimi_k2", kimi('{"s": "%s"}')),
        ("openai", harmony('{"s": "%s"}')),
    ],
)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("a\nb\tc\x01", "a\nb\tc\x01"),
        (r"C:\dir \$x \' \users", r"C:\dir \$x ' \users"),
        (r"a\\b\"c\n\u00e9, True,}", 'a\\b"c\né, True,}'),
    ],
)
def test_strings_with_invalid_characters_are_valid_json(
    tools: str, text: str, written: str, value: str
) -> None:
    assert parse(text.replace("%s", written), tools) == ([("f", {"s": value})], "", "")


@pytest.mark.parametrize("write", [hermes, harmony])
def test_constants_of_python_and_trailing_commas_are_valid_json(write: Any) -> None:
    tools = "openai" if write is harmony else "hermes"
    text = write('{"a": [True, None,\n ], "b": False , "c": {"d": NaN,},}')
    assert parse(text, tools)[0] == [("f", {"a": [True, None], "b": False, "c": {"d": None}})]


def test_arguments_of_harmony_end_at_the_next_channel() -> None:
    text = harmony('{"s": "<|channel|>"}').replace("<|call|>", "<|channel|>final<|message|>ok")
    assert parse(text, "openai", "openai_gptoss") == ([("f", {"s": "<|channel|>"})], "ok", "")


def qwen(name: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("b", "true", True),
        ("t", "12", "12"),
        ("u", "12", "12"),
        ("l", "['q']", ["q"]),
        ("o", '{"k": "a\nb",}', {"k": "a\nb"}),
        ("o", r'{"k": "it\'s"}', {"k": "it's"}),
        ("o", r'{"k": "it\'s", "n": null}', {"k": "it's", "n": None}),
        ("l", r'["\x41"]', ["A"]),
        ("l", "[NaN]", [None]),
        ("l", r"[{\"k\": \"a\"}, null]", [{"k": "a"}, None]),
        ("so", '{"k": 1}', {"k": 1}),
        ("so", "{k}", "{k}"),
        ("so", "[1]", "[1]"),
    ],
)
def test_names_of_types_in_other_spellings_apply(name: str, written: str, value: object) -> None:
    assert parse(qwen(name, written), "qwen3_coder")[0] == [("f", {name: value})]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("qwen3_coder", "Use <function=f> to call it."),
        ("qwen3_coder", "Write `<function=NAME>` first."),
        ("qwen3_coder", "The <tool_call> <function=f> tag"),
        ("seed_oss", "Use <function=f> tag"),
        ("minimax_m2", 'Use <minimax:tool_call> <invoke name="f"> tag'),
        ("glm45", "The <tool_call>\nf\ntag"),
    ],
)
def test_a_tag_in_prose_is_no_call(tools: str, text: str) -> None:
    assert parse(text, tools) == ([], text, "")
    call = {
        "qwen3_coder": qwen("x", "1"),
        "seed_oss": qwen("x", "1").replace("tool_call", "seed:tool_call"),
        "minimax_m2": invoke('"'),
        "glm45": "<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
    }[tools]
    thought = f"<think>{text}</think>"
    assert parse(thought + call, tools, "qwen3") == ([("f", {"x": 1})], "", text)


def invoke(quote: str) -> str:
    return (
        f"<minimax:tool_call>\n<invoke name={quote}f{quote}>\n<parameter name={quote}x{quote}>1</parameter>\n"
        "</invoke>\n</minimax:tool_call>"
    )


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("minimax_m2", invoke("'")),
        ("minimax_m2", invoke("")),
        ("minimax_m2", '<invoke name="f"><parameter name="x">1</parameter></invoke>'),
        ("qwen3_coder", '<tool_call><function="f"><parameter="x">1</parameter></function></tool_call>'),
        ("qwen3_coder", '<function=f>{"x": 1}</function>'),
        ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f">\n{"x": 1,}\n</｜DSML｜invoke>'),
        ("qwen3_coder", "<tool_call>\n<function=f\n<parameter=x\n1\n</parameter>\n</function>\n</tool_call>"),
        ("deepseek_v32", '<｜DSML｜invoke name="f">\n{"x": 1}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>'
            "</｜DSML｜invoke></｜DSML｜function_calls>",
        ),
    ],
)
def test_tags_in_other_spellings_are_calls(tools: str, text: str) -> None:
    assert parse(text, tools) == ([("f", {"x": 1})], "", "")


@pytest.mark.parametrize(
    "value",
    [
        "a </function> b",
        "a <parameter=g> b",
        "a </tool_call> b",
        "a\n</function> b",
        "a </parameter> b",
        "<x>\n</parameter>\n</x>",
    ],
)
def test_marks_within_a_value_are_text(value: str) -> None:
    assert parse(qwen("s", value), "qwen3_coder") == ([("f", {"s": value})], "", "")


@pytest.mark.parametrize(
    ("following", "arguments"),
    [
        ("</function>\n</tool_call>", {"x": 5}),
        ("<parameter=s>\nb\n</parameter>\n</function>\n</tool_call>", {"x": 5, "s": "b"}),
    ],
)
def test_a_number_ends_at_any_mark(following: str, arguments: dict[str, Any]) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\n5" + following
    assert parse(text, "qwen3_coder") == ([("f", arguments)], "", "")


def test_an_end_mark_within_an_inline_value_is_text() -> None:
    text = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</tool_call>b</arg_value>\n</tool_call>"
    assert parse(text, "glm45") == ([("f", {"s": "a</tool_call>b"})], "", "")
    text = text.replace("a</tool_call>b", "a</arg_value>b")
    assert parse(text, "glm45") == ([("f", {"s": "a</arg_value>b"})], "", "")


@pytest.mark.parametrize(
    ("omitted", "following", "content"),
    [
        ("\n</parameter>", "", ""),
        ("\n</parameter>", "\nDone.", "Done."),
        ("\n</parameter>", " Done.", "Done."),
        ("\n</parameter>\n</function>", "\nDone.", "Done."),
        ("\n</parameter>|\n</tool_call>", "\nDone.", "Done."),
        ("\n</parameter>\n</function>", "", ""),
    ],
)
def test_a_value_without_an_end_tag_ends_with_the_call(omitted: str, following: str, content: str) -> None:
    text = qwen("s", "a")
    for part in omitted.split("|"):
        text = text.replace(part, "")
    assert parse(text + following, "qwen3_coder") == ([("f", {"s": "a"})], content, "")
    if content == "":
        assert parse(text + "\n" + text, "qwen3_coder")[0] == [("f", {"s": "a"})] * 2


@pytest.mark.parametrize("value", ["a", "a </function> b", "a\n</function> b"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_end_of_the_output_within_a_value_closes_the_arguments(value: str, is_cut: bool) -> None:
    text = qwen("s", value)[: -len("\n</parameter>\n</function>\n</tool_call>")]
    parser = build("", "qwen3_coder", SCHEMAS, "")
    deltas = parser.push(text) + parser.finish(is_cut=is_cut)
    written = "".join(delta.text for delta in deltas if delta.channel is Channel.ARGUMENTS)
    assert written == (json.dumps({"s": value}) if not is_cut else json.dumps({"s": value})[:-2])
    assert is_cut or parse(text, "qwen3_coder") == ([("f", {"s": value})], "", "")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "args": {"x": 1}}',
        '{"name": "f", "input": {"x": 1}}',
        '{"tool": "f", "arguments": {"x": 1}}',
    ],
)
def test_other_keys_of_a_call_are_read_after_a_mark(text: str) -> None:
    assert parse(f"<tool_call>{text}</tool_call>", "hermes") == ([("f", {"x": 1})], "", "")
    assert parse(text, "xlam") == ([], text, "")


@pytest.mark.parametrize(
    "function",
    [
        '{"name": "f", "description": "d", "parameters": {"type": "object"}}',
        '{"name": "f", "parameters": {"type": "object"}}',
        '{"name": "f"}',
        '{"name": "f", "description": "d", "arguments": {"x": 1}}',
    ],
)
def test_a_quoted_definition_of_a_tool_is_no_call(function: str) -> None:
    for definition in (function, f'{{"type": "function", "function": {function}}}'):
        text = f"A\n<tools>\n{definition}\n{definition}\n</tools>\nB"
        assert parse(text, "hermes") == ([], text, "")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"name": "f", "tool": "y", "arguments": {"x": 1}}', '"tool": "y"'),
        ('{"tool": "y", "name": "f", "arguments": {"x": 1}}', ""),
        ('{"tool": "f", "arguments": {"x": 1}, "name": "y"}', '"name": "y"'),
        ('{"name": "f", "args": {"x": 1}, "arguments": {}}', '"arguments": {}'),
        ('{"input": "q", "name": "f", "arguments": {"x": 1}}', '"input": "q"'),
        ('{"input": {"q": 1}, "name": "f", "arguments": {"x": 1}}', '"input": {"q": 1}'),
        ('{"name": "f", "input": "q", "arguments": {"x": 1}}', '"input": "q"'),
        ('{"name": "f", "arguments": {"x": 1}, "input": "q"}', '"input": "q"'),
    ],
)
def test_other_keys_beside_the_usual_keys_are_content(text: str, content: str) -> None:
    assert parse(f"<tool_call>{text}</tool_call>", "hermes") == ([("f", {"x": 1})], content, "")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tools>\n{"name": "f", "arguments": {"x": 1}}\n</tools>'),
        ("llama3_json", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>'),
        ("gemma", '<|tool_call>call:f{"x": 1}<tool_call|>'),
        ("gemma", '<|tool_call>call:f{ "x": 1}<tool_call|>'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n{"x": 1}\n```<｜tool▁call▁end｜>'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```\n{"x": 1}\n```'),
    ],
)
def test_calls_in_other_marks_are_read(tools: str, text: str) -> None:
    assert parse("Yes." + text, tools) == ([("f", {"x": 1})], "Yes.", "")
    assert parse(text + text, tools)[0] == [("f", {"x": 1})] * 2


def test_values_of_json_in_gemmas_format_keep_their_types() -> None:
    text = r'<|tool_call>call:f{"s": "a, b} \"q\"\n\u00e9", "o": {"k": [1, null, true]}}<tool_call|>'
    assert parse(text, "gemma")[0] == [("f", {"s": 'a, b} "q"\né', "o": {"k": [1, None, True]}})]


@pytest.mark.parametrize(
    ("tools", "second", "first"),
    [
        ("hermes", qwen("x", "1"), hermes('{"x": 1}')),
        ("qwen3_coder", hermes('{"x": 1}'), qwen("x", "1")),
        (
            "glm45",
            hermes('{"x": 1}'),
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        ),
        (
            "lfm2",
            '<|tool_call_start|>[{"name": "f", "arguments": {"x": 1}}]<|tool_call_end|>',
            "<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
        ),
        (
            "lfm2",
            '<|tool_call_start|>[\n  {"name": "f", "arguments": {"x": 1}}\n]<|tool_call_end|>',
            "<|tool_call_start|>[\n  f(x=1)]<|tool_call_end|>",
        ),
    ],
)
def test_the_text_after_a_mark_decides_the_format(tools: str, second: str, first: str) -> None:
    calls = [("f", {"x": 1})]
    assert parse("A\n" + second + "\nB", tools) == (calls, "AB", "")
    assert parse("\n".join([second, first, first, second, second]), tools) == (calls * 5, "", "")
    mark = second[: second.index(">") + 1]
    text = f"The {mark} {{mark}} and {mark} <function= and {mark}"
    assert parse(text, tools) == ([], text, "")
    assert parse(f"<think>a{second}", tools, "qwen3") == (calls, "", "a")


@pytest.mark.parametrize("name", ["x", "b", "o"])
def test_an_empty_value_of_a_type_other_than_string_is_no_argument(name: str) -> None:
    empty = f"<parameter={name}>\n</parameter>\n"
    text = (
        qwen("s", "")
        .replace("<parameter=s>", empty + "<parameter=s>")
        .replace("</function>", empty + "</function>")
    )
    assert parse(text, "qwen3_coder") == ([("f", {"s": ""})], "", "")


@pytest.mark.parametrize(("written", "value"), [('"12"', "12"), ("NaN", "NaN"), ("true", True)])
def test_a_parameter_marked_as_json_is_json(written: str, value: object) -> None:
    text = f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="false">{written}</｜DSML｜parameter></｜DSML｜invoke>'
    assert parse(text, "deepseek_v32") == ([("f", {"s": value})], "", "")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("glm45", "<tool_call>f</arg_value>"),
        ("glm45", "<tool_call>f</arg_value></tool_call>"),
        ("glm45", "<tool_call>f<tool_call>f</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f"/>\n</｜DSML｜tool_calls>'),
        ("kimi_k2", kimi("").replace("<|tool_call_argument_begin|>", "") + kimi("{}")),
        ("mistral", "[TOOL_CALLS]f[TOOL_CALLS]f{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]f[ARGS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁call▁begin｜>f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>'),
    ],
)
def test_calls_without_arguments_are_calls(tools: str, text: str) -> None:
    calls, content, _ = parse(text, tools)
    assert set(map(str, calls)) == {"('f', {})"} and content == ""


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'),
        ("kimi_k2", kimi('{"x": 1}')),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}'),
        ("hermes", hermes('{"x": 1}')),
    ],
)
@pytest.mark.parametrize("between", ["", " would help. "])
def test_a_mark_without_a_call_does_not_hide_a_call(tools: str, call: str, between: str) -> None:
    mark = call[: call.index("]" if tools == "mistral" else ">") + 1]
    calls, content, _ = parse(f"I write {mark}{between}{call}", tools)
    assert (calls, content) == ([("f", {"x": 1})], f"I write {mark}{between}".strip())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"x": 1}}',
        '```json\n{"name": "f", "arguments": {"x": 1}}\n```',
        '```\n[\n  {"name": "f", "arguments": {"x": 1}}\n]\n```',
        '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '<tools>{"name": "f", "arguments": "{\\"x\\": 1}"}</tools>',
        "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>",
        '<tool_call>\n```json\n{"name": "f", "arguments": {"x": 1}}\n```\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}}\n</tool_call>',
    ],
)
def test_hermes_reads_calls_without_marks_and_with_a_fence(text: str) -> None:
    assert parse(text, "hermes") == ([("f", {"x": 1})], "", "")
    assert parse(f"Yes.\n\n{text}\n\n```python\nf()\n```", "hermes") == (
        [("f", {"x": 1})],
        "Yes.```python\nf()\n```",
        "",
    )


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '```json\n{"name": "f", "arguments": {"x": 1}}\n```\n\n' * 2),
        ("hermes", hermes('{"x": 1}') + '\n\n{"name": "f", "arguments": {"x": 1}}'),
        ("pythonic", "[f(x=1)]\n[f(x=1)]"),
    ],
)
def test_a_call_without_a_mark_may_follow_another_call(tools: str, text: str) -> None:
    assert parse(text, tools) == ([("f", {"x": 1})] * 2, "", "")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "arguments": "none"}',
        '```json\n{"name": "f", "description": "d", "arguments": {}}\n```',
        'It is `{"name": "f", "arguments": {}}`.',
        '```\n{"calls": [{"name": "f", "arguments": {}}]}\n```',
        "```python\nf(x=1)\n```",
    ],
)
def test_other_json_without_marks_is_content(text: str) -> None:
    assert parse(text, "hermes") == ([], text, "")
    assert parse(f"Look:\n{text}\nDone.", "hermes") == ([], f"Look:\n{text}\nDone.", "")
    thought = f"So:\n{text}\nand {{}}"
    assert parse(f"<think>{thought}</think>Yes.", "hermes", "qwen3") == ([], "Yes.", thought)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('Sure: {"name": "f", "parameters": {"x": 1}} It runs.', "Sure:It runs."),
        ('I use {f}: [{"name": "f", "parameters": {"x": 1}}]', "I use {f}:"),
        ('{"name": "f", "parameters": {"x": 1}}}', ""),
    ],
)
def test_llama_calls_begin_anywhere(text: str, content: str) -> None:
    assert parse(text, "llama3_json") == ([("f", {"x": 1})], content, "")


@pytest.mark.parametrize(
    "text",
    [
        '<|python_start|>{"name": "f", "parameters": {"x": 1}}<|python_end|>',
        '{"type": "function", "name": "f", "parameters": {"x": 1}}',
        '[{"name": "f", "parameters": {"x": 1}}]',
        "[f(x=1)]",
    ],
)
def test_llama4_pythonic_also_reads_json(text: str) -> None:
    assert parse(text, "llama4_pythonic") == ([("f", {"x": 1})], "", "")
    assert parse("Yes.\n" + text, "llama4_pythonic") == ([("f", {"x": 1})], "Yes.", "")


@pytest.mark.parametrize(
    "text",
    [
        '<|tool_call>:f{s:<|"|>a<|"|>}<tool_call|>',
        '<|tool_call>:call:f{s:<|"|>a<|"|>}<tool_call|>',
        '<|tool_call>f{s:<|"|>a<|"|>}<tool_call|>',
        '<|tool_call>call:f(s:<|"|>a<|"|>)<tool_call|>',
        'call:f{s:<|"|>a<|"|>}<tool_call|>',
    ],
)
def test_other_beginnings_of_gemmas_calls_are_read(text: str) -> None:
    assert parse(text, "gemma") == ([("f", {"s": "a"})], "", "")
    assert (
        parse("Yes.\n" + text + text.replace("call:f{", "<|tool_call>call:f{"), "gemma")[0]
        == [("f", {"s": "a"})] * 2
    )


def test_strings_of_json_and_python_in_gemmas_format_have_no_quotes() -> None:
    text = """<|tool_call>call:f{l:["a", 'b, c'], o:{"k": "it's"}, s:it's}<tool_call|>"""
    assert parse(text, "gemma")[0] == [("f", {"l": ["a", "b, c"], "o": {"k": "it's"}, "s": "it's"})]


def test_a_call_in_prose_is_no_gemma_call() -> None:
    text = "f{x:1}\ncall: f{x:1}\nI call:f{x:1} here."
    assert parse(text, "gemma") == ([], text, "")


def test_arguments_that_are_text_are_a_json_string() -> None:
    assert parse(hermes('"hello"'), "hermes") == ([("f", "hello")], "", "")


def test_singular_marks_of_kimis_section_are_removed() -> None:
    text = f"A<|tool_call_section_begin|>{kimi('{}')}<|tool_call_section_end|>"
    assert parse(text, "kimi_k2", "kimi_k2") == ([("f", {})], "A", "")


def test_calls_of_step3_are_read_with_and_without_their_type() -> None:
    invoke = '<steptml:invoke name="f"><steptml:parameter name="s"> a\n</steptml:parameter></steptml:invoke>'
    typed = f"<｜tool_call_begin｜>function<｜tool_sep｜>\n{invoke}<｜tool_call_end｜>"
    untyped = f"<｜tool_call_begin｜>{invoke}<｜tool_call_end｜><｜tool_sep｜>"
    for inner in (typed + untyped, untyped + typed, invoke * 2):
        text = f"A<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>B"
        assert parse(text, "step3") == ([("f", {"s": " a\n"})] * 2, "AB", "")


def test_content_of_gigachat_ends_at_the_separator() -> None:
    call = 'function call<|role_sep|>\n{"name": "f", "arguments": {"x": 1}}'
    assert parse(f"A<|message_sep|>\n\n{call}", "gigachat3") == ([("f", {"x": 1})], "A", "")
    assert parse("This function calls f.", "gigachat3") == ([], "This function calls f.", "")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'sed -n '1,5p' a.py'", "sed -n '1,5p' a.py"),
        ("'a \"b\" c'", 'a "b" c'),
        ('"say "hi" to me"', 'say "hi" to me'),
        ("'g(h(1, x='b'))'", "g(h(1, x='b'))"),
        ("['a' , 'b'c']", ["a", "b'c"]),
        ("{'k' : ['v']}", {"k": ["v"]}),
        ("07", 7),
    ],
)
def test_quotes_without_an_escape_are_part_of_a_string(written: str, value: object) -> None:
    calls = [("f", {"s": value, "x": 1}), ("f", {"s": value})]
    text = f"[f(s={written}, x=1), f(s={written})]"
    assert parse(text, "pythonic") == (calls, "", "")
    assert parse(f"<|tool_call_start|>{text}<|tool_call_end|>A", "lfm2") == (calls, "A", "")
    lines = text[1:-1].replace("), f", ")\nf")
    assert parse(f"<function_calls>{lines}</function_calls>A", "olmo3") == (calls, "A", "")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS] []"),
        ("granite", "<|tool_call|>[ ]"),
        ("hermes", "<tool_call>[]</tool_call>"),
    ],
)
def test_an_empty_list_after_a_mark_is_no_content(tools: str, text: str) -> None:
    assert parse(f"A {text}\nB", tools) == ([], "AB", "")
    assert parse("a = []\n[]", tools) == ([], "a = []\n[]", "")


def test_a_comma_before_the_end_of_a_list_is_no_content() -> None:
    assert parse('[TOOL_CALLS][{"name": "f", "arguments": {}},]', "mistral") == ([("f", {})], "", "")
    assert parse("[f(x=1), ]", "pythonic") == ([("f", {"x": 1})], "", "")


@pytest.mark.parametrize("kind", ["true", "false"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": 1, "s": "a"}', {"x": 1, "s": "a"}),
        ("{}", {}),
        ("ls", {"input": "ls"}),
        ('{"x": 1', {"input": '{"x": 1'}),
    ],
)
def test_a_parameter_with_all_arguments_is_unwrapped(kind: str, written: str, arguments: object) -> None:
    value = f'<｜DSML｜parameter name="input" string="{kind}">{written}</｜DSML｜parameter>'
    text = f'<｜DSML｜tool_calls><｜DSML｜invoke name="f">{value}</｜DSML｜invoke></｜DSML｜tool_calls>'
    assert parse(text, "deepseek_v32") == ([("f", arguments)], "", "")


def test_a_parameter_that_the_function_has_is_not_unwrapped() -> None:
    text = "<tool_call><function=f><parameter=o>{}</parameter><parameter=input>{}</parameter></function></tool_call>"
    assert parse(text, "qwen3_coder") == ([("f", {"o": {}, "input": {}})], "", "")
    assert parse(text.replace("=f>", "=h>"), "qwen3_coder") == ([("h", {"o": {}, "input": {}})], "", "")
