"""Formats of single models, and errors that they make: same result for any division."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.text.outputs import horizon, hunyuan, inkling, kimi_k3, minimax_m3, muse, with_hunyuan_suffix
from tests.text.parsers.test_parsers import calls_in, parse_truncated, read, text_of

from quintet.detokenizer_proc.parsers.registry import build, marks_of
from quintet.wire.channels import Channel

CALLS = [("f", {"s": 'a "b" <c>', "x": 1}), ("g", {})]
POINT = {"properties": {"zip": {"type": "string"}, "y": {"type": "number"}}}
PARAMETERS = {
    "$defs": {"P": POINT},
    "properties": {
        "s": {"type": "string"},
        "x": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "points": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}},
        "o": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
SCHEMAS = json.dumps(
    [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
).encode()


def parse(text: str, name: str, reasoning: str = "", prompt: str = "") -> tuple[list[Any], str, str]:
    """Return calls, content and reasoning, equal for the whole text and for single characters."""
    whole = read(build(reasoning, name, SCHEMAS, prompt), [text])
    assert read(build(reasoning, name, SCHEMAS, prompt), list(text)) == whole
    return calls_in(whole), text_of(whole), text_of(whole, Channel.REASONING)


K3_ANSWER = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
K3_THOUGHT = "<|open|>think<|sep|>So<|close|>think<|sep|>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hy_v3", f"<think>So</think>Yes.{hunyuan(CALLS)}"),
        ("hy_v3", with_hunyuan_suffix(f"<think>So</think>Yes.{hunyuan(CALLS)}")),
        ("hy_v3", f"<think>So</think>Yes.{hunyuan(CALLS).replace('<tool_sep>', '')}"),
        ("k2_horizon", f"<ifm|think_fast>So</ifm|think_fast>Yes.{horizon(CALLS)}"),
        ("kimi_k3", f"{K3_THOUGHT}{K3_ANSWER}{kimi_k3(CALLS)}<|close|>message<|sep|>"),
        ("minimax_m3", f"<mm:think>So</mm:think>Yes.{minimax_m3(CALLS)}"),
        ("inkling", f"<|content_thinking|>So<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>{inkling(CALLS)}"),
        ("muse_glimmer", f" to=self<|message|>So<|eom|><|start|>assistant to=user<|message|>Yes.<|eom|>{muse(CALLS)}"),
    ],
)  # fmt: skip
def test_reasoning_content_and_calls_are_separated(name: str, text: str) -> None:
    assert parse(text, name, name) == (CALLS, "Yes.", "So")
    assert parse(text.replace("So", "").replace("Yes.", ""), name, name) == (CALLS, "", "")
    assert parse(text, "", name)[1:] == (parse(text, "", name)[1], "So")
    calls, _, reasoning = parse(text, name)
    assert (calls, reasoning) == (CALLS, "")


@pytest.mark.parametrize(
    ("name", "mark", "text"),
    [
        ("hy_v3", "<think:opensource>", with_hunyuan_suffix(f"So{hunyuan(CALLS)}")),
        ("k2_horizon", "<ifm|think>", f"So{horizon(CALLS)}"),
        ("kimi_k3", "<|open|>think<|sep|>", f"So{kimi_k3(CALLS)}"),
        ("minimax_m3", "<mm:think>", f"So{minimax_m3(CALLS)}"),
        ("inkling", "<|message_model|><|content_thinking|>", f"So{inkling(CALLS)}"),
        ("muse_glimmer", "<|start|>assistant to=self<|message|>", f"So{muse(CALLS)}"),
    ],
)
def test_a_call_ends_reasoning_that_the_prompt_began(name: str, mark: str, text: str) -> None:
    assert parse(text, name, name, mark) == (CALLS, "", "So")


def test_marks_of_several_tokens_are_seen_and_cut_marks_dropped() -> None:
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= marks_of("kimi_k3", "kimi_k3")
    assert {"<tool_call:opensource>", "</arg_value:opensource>"} <= marks_of("", "hy_v3")
    for text in ("A<|close|>response", "A<|close|>", "A<|open|>tools"):
        parser = build("kimi_k3", "kimi_k3", b"", "")
        deltas = parser.push("<|open|>response<|sep|>" + text) + parser.finish(is_cut=True)
        assert text_of(deltas) == "A"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|open|>call tool="a&amp;b" index="1"<|sep|><|close|>call<|sep|>', [("a&b", {})]),
        (
            '<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{"x": 1}<|close|>json<|sep|><|close|>call<|sep|>',
            [("f", {"x": 1})],
        ),
        (
            '<|open|>call tool="f"<|sep|><|open|>argument key="z" type="string"<|sep|> 1 <|close|>argument<|sep|>'
            "<|close|>call<|sep|>",
            [("f", {"z": " 1 "})],
        ),
        ('<|open|>call index="1"<|sep|><|close|>call<|sep|>', []),
    ],
)
def test_attributes_of_kimi_k3_give_names_and_types(text: str, calls: list[Any]) -> None:
    assert parse(f"<|open|>tools<|sep|>{text}<|close|>tools<|sep|>", "kimi_k3")[0] == calls


NS = "]<]minimax[>["


def tag(key: str, value: str) -> str:
    return f"{NS}<{key}>{value}{NS}</{key}>"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (tag("tags", tag("item", "1") + "\n" + tag("item", "b")), {"tags": ["1", "b"]}),
        (tag("points", tag("item", tag("zip", "01") + tag("y", "2"))), {"points": [{"zip": "01", "y": 2}]}),
        (
            tag("o", tag("k", "1")) + tag("u", tag("v", "1") + tag("w", tag("item", "q"))),
            {"o": {"k": "1"}, "u": {"v": 1, "w": ["q"]}},
        ),
        (tag("tags", '["a"]') + tag("points", "") + tag("x", ""), {"tags": ["a"], "points": []}),
        (f"{NS}<s>ls -l</s>\n{NS}<x>1</x>", {"s": "ls -l", "x": 1}),
        (tag("s", f"<b></s> a {NS}<i>x"), {"s": "<b></s> a <i>x"}),
        ('{"s": "a"}', {"s": "a"}),
        (f"{NS}a.txt{NS}</s>{NS}<x>1{NS}</x>", {"s": "a.txt", "x": 1}),
        (f"{NS}<o>{NS}1{NS}</k>{NS}</o>{NS}2{NS}</x>", {"o": {"k": "1"}, "x": 2}),
        (tag("u", tag("v", "1") + tag("v", "2")), {"u": {"v": [1, 2]}}),
        (tag("-A", "1"), {"-A": 1}),
    ],
)
def test_nested_tags_are_objects_and_lists(written: str, arguments: object) -> None:
    text = f'{NS}<tool_call>\n{NS}<invoke name="f">{written}{NS}</invoke>\n{NS}</tool_call>'
    assert parse(f"A\n{text}\nB", "minimax_m3") == ([("f", arguments)], "AB", "")
    omitted = text.replace(f"{NS}<invoke", "<invoke").replace(f"{NS}</invoke>\n", "")
    assert parse(omitted, "minimax_m3")[0] == [("f", arguments)]


def test_the_end_of_the_output_closes_nested_tags_unless_it_is_cut() -> None:
    text = f'{NS}<tool_call>{NS}<invoke name="f">{NS}<tags>{NS}<item>a'
    assert parse(text, "minimax_m3")[0] == [("f", {"tags": ["a"]})]
    deltas = parse_truncated("minimax_m3", text)
    assert [delta.text for delta in deltas] == ["f", "{"]
    assert parse(f"odd {NS} text", "minimax_m3") == ([], f"odd {NS} text", "")


def test_headers_of_messages_are_no_content() -> None:
    call = '{"args": {"x": 1}, "name": "f"}<|end_message|>'
    assert parse(f"f<|content_invoke_tool_json|>{call}", "inkling", "inkling") == ([("f", {"x": 1})], "", "")
    text = f"<|content_thinking|>So <|message_model|>f<|content_invoke_tool_json|>{call}"
    assert parse(text, "inkling", "inkling") == ([("f", {"x": 1})], "", "So")
    text = f" to=self<|message|>So to=f{muse(CALLS).removeprefix('<|start|>assistant to=tool')}"
    assert parse(text, "muse_glimmer", "muse_glimmer") == (CALLS, "", "So to=f")
    assert parse("to be or not\n to=be", "muse_glimmer", "muse_glimmer") == ([], "to be or not\n to=be", "")
    parser = build("muse_glimmer", "muse_glimmer", b"", "")
    assert parser.push(" to=us") + parser.finish(is_cut=True) == []


def gemma(arguments: str) -> str:
    return "<|tool_call>call:f{" + arguments.replace("“", '<|"|>') + "}<tool_call|>"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("print(“hi“, end=““)", 'print("hi", end="")'),
        ("sql(“““ SELECT 1 “““).df()", 'sql(""" SELECT 1 """).df()'),
        ("d = {“a“: 1, “b“: [2]}\nprint(d)", 'd = {"a": 1, "b": [2]}\nprint(d)'),
        ("l = [“a“, “b“]\n", 'l = ["a", "b"]\n'),
        ("“quoted“", '"quoted"'),
        ("<b>“</b>", '<b>"</b>'),
    ],
)
def test_gemmas_mark_within_a_string_is_a_quote(written: str, value: str) -> None:
    calls = [("f", {"s": value, "l": ["x", "y"], "e": ""})]
    assert parse(gemma(f"s:“{written}“,l:[“x“,“y“],e:““"), "gemma") == (calls, "", "")
    assert parse(gemma(f"l:[“x“,“y“],e:““,s:“{written}“"), "gemma")[0][0][1]["s"] == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", '<|tool_call>call:f{s:<|"|>a<|"|><tool_call|>'),
        ("gemma", '<|tool_call>call:f{s:<|"|>a'),
        ("gemma", "<start_function_call>call:f(s:<escape>a<escape>)<end_function_call>"),
        ("lfm2", "<|tool_call_start|>[f(s='a'<|tool_call_end|>"),
        ("pythonic", "[f(s='a"),
        ("olmo3", "<function_calls>f(s='a'</function_calls>"),
    ],
)
def test_a_call_without_its_closing_brackets_is_complete(name: str, text: str) -> None:
    assert parse(text, name) == ([("f", {"s": "a"})], "", "")


@pytest.mark.parametrize("group", ["tool_calls", "calls", "toolcalls"])
@pytest.mark.parametrize(
    "mark", ["｜DSML｜", "｜DSML｜ ", "｜｜DSML｜｜", "｜｜DSML｜｜ ", "|DSML|", "‖DSML‖"]
)
def test_deepseeks_marks_in_other_spellings_are_read(mark: str, group: str) -> None:
    value = '<｜DSML｜parameter name="s" string="true">a</｜DSML｜parameter>'
    text = f'<｜DSML｜{group}>\n<｜DSML｜invoke name="f">{value}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    text = text.replace("｜DSML｜", mark)
    assert parse(f"A{text}", "deepseek_v32") == ([("f", {"s": "a"})], "A", "")
    assert parse(f"So{text}", "deepseek_v32", "deepseek_v3", "<think>") == ([("f", {"s": "a"})], "", "So")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=s>%s</parameter>\n</parameter>\n<parameter=x>1</parameter></function></tool_call>",
        ),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="s">%s</parameter></parameter><parameter name="x">1</parameter></invoke>',
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>s</arg_key><arg_value>%s</arg_value></arg_value>"
            "<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        ),
    ],
)
def test_a_doubled_end_tag_is_no_text(name: str, text: str) -> None:
    assert parse(text % "a", name) == ([("f", {"s": "a", "x": 1})], "", "")
    begin = "<arg_value>" if name == "glm45" else "<parameter>"
    value = f"{begin}b{begin.replace('<', '</')}"
    once = text.replace("</parameter>\n</parameter>", "</parameter>").replace(
        "</parameter></parameter>", "</parameter>"
    )
    assert parse(once.replace("</arg_value></arg_value>", "</arg_value>") % value, name)[0] == [
        ("f", {"s": value, "x": 1})
    ]


@pytest.mark.parametrize("name", ["glm45", "hy_v3"])
@pytest.mark.parametrize(
    ("usual", "written"),
    [
        ("f<arg_key>s</arg_key>", "f<tool_call>s</arg_key>"),
        ("f<arg_key>s</arg_key>", "f\n<tool_call> s </arg_key>"),
        ("<arg_key>x</arg_key>", "<arg_key>x"),
    ],
)
def test_a_wrong_or_missing_mark_of_a_key_is_read(name: str, usual: str, written: str) -> None:
    text = (
        "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value>"
        "<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    )
    assert usual in text
    assert parse(text.replace(usual, written), name) == ([("f", {"s": "a", "x": 1})], "", "")
    two = "<tool_call>f<tool_call>g<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse(two, name) == ([("f", {}), ("g", {"x": 1})], "", "")


JSON_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s\n</tool_call>',
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "llama3_json": '{"name": "f", "parameters": %s',
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>",
    "qwen3_coder": "<tool_call>\n<function=f>\n%s\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"s": "a"', {"s": "a"}),
        ('{"tags": ["a"}', {"tags": ["a"]}),
        ('{"points": [{"y": 1], "x": 2}', {"points": [{"y": 1}], "x": 2}),
        ('{"o": {"k": [1, ', {"o": {"k": [1]}}),
        ('{"s": "a", "x": ', {"s": "a", "x": None}),
        ('{"s": "]}"]}', {"s": "]}"}),
    ],
)
def test_brackets_that_a_model_omits_are_closed(name: str, written: str, arguments: object) -> None:
    assert parse(JSON_CALLS[name] % written, name) == ([("f", arguments)], "", "")


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize("written", ['{"s": "a', '{"s": "a", "tags": [1'])
def test_arguments_that_a_limit_or_an_open_string_ends_are_not_closed(name: str, written: str) -> None:
    text = JSON_CALLS[name][: JSON_CALLS[name].index("%s")] + written
    assert text_of(parse_truncated(name, text), Channel.ARGUMENTS).rstrip() == written
    if written.endswith("a"):
        assert text_of(read(build("", name, SCHEMAS, ""), [text]), Channel.ARGUMENTS) == written
