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
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    texts = dict.fromkeys((Channel.CONTENT, Channel.REASONING), "")
    names, arguments = list[str](), list[str]()
    for channel, call, text in pieces:
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
    pieces = parser.push(text) + parser.finish(is_cut=is_cut)
    written = "".join(piece.text for piece in pieces if piece.channel is Channel.ARGUMENTS)
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
