"""Parsers of reasoning, alone and before parsers of calls; examples of parsed outputs."""

from __future__ import annotations

import json

import pytest
from tests.text.outputs import WRITERS, Call
from tests.text.parsers.test_parsers import FEW, Random, calls_in, check_broken, read, schemas_of, text_of

from quintet.detokenizer_proc.parsers.formats import REASONING, TOOLS
from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser, joined
from quintet.detokenizer_proc.parsers.json_calls import JsonFormat
from quintet.detokenizer_proc.parsers.literal_calls import LiteralFormat
from quintet.detokenizer_proc.parsers.registry import build, marks_of
from quintet.detokenizer_proc.parsers.tagged_calls import TagFormat
from quintet.detokenizer_proc.parsers.thinking import ThinkFormat
from quintet.wire.channels import Channel

CONTENT, REASON, NAME, ARGUMENTS = Channel
THINKING = {
    name: form for name, form in REASONING.items() if isinstance(form, ThinkFormat) and not form.is_kept
}


@pytest.mark.parametrize("name", THINKING)
def test_text_between_the_marks_is_reasoning(name: str) -> None:
    form = THINKING[name]
    for opening, closing in zip(form.opens, form.closes, strict=True):
        text = f"{opening}\nHmm, {opening[:-1]}?\n\n{closing}\n\nYes: {closing}.\n"
        deltas = read(build(name, "", b"", ""), [text])
        assert deltas == [
            ChannelText(REASON, 0, f"Hmm, {opening[:-1]}?"),
            ChannelText(CONTENT, 0, f"Yes: {closing}.\n"),
        ]


@pytest.mark.parametrize("name", THINKING)
def test_a_prompt_that_ends_in_an_open_mark_starts_in_reasoning(name: str) -> None:
    form = THINKING[name]
    opening, closing = form.opens[-1], form.closes[-1]
    inside = build(name, "", b"", f"user: hi\n{opening}\n")
    assert inside.is_reasoning
    assert read(inside, ["a", f"b{closing}", "c"]) == [
        ChannelText(REASON, 0, "ab"),
        ChannelText(CONTENT, 0, "c"),
    ]
    repeated = build(name, "", b"", f"user: hi\n{opening}\n")
    assert read(repeated, [f"{opening}\na{closing}c"]) == [
        ChannelText(REASON, 0, "a"),
        ChannelText(CONTENT, 0, "c"),
    ]
    outside = build(name, "", b"", f"user: hi\n{opening}\n\n{closing}\n\n")
    assert not outside.is_reasoning
    assert read(outside, ["It is c."]) == [ChannelText(CONTENT, 0, "It is c.")]
    spoken = build(name, "", b"", f"user: what does {opening} mean?\nassistant:")
    assert spoken.is_reasoning == form.begins_inside


def test_a_closing_mark_at_the_beginning_repeats_the_prompts() -> None:
    parser = build("qwen3", "hermes", b"", "assistant:<think>\n\n</think>\n\n")
    assert read(parser, list("\n</think>\n\nYes. </think>")) == [ChannelText(CONTENT, 0, "Yes. </think>")]


def test_marks_around_an_answer_without_reasoning_are_removed() -> None:
    parser = build("hunyuan_a13b", "", b"", "assistant:<think>\n\n</think>\n")
    assert read(parser, list("<answer>\nYes.\n</answer>")) == [ChannelText(CONTENT, 0, "Yes.")]


@pytest.mark.parametrize("output", ["So</think>\n\nYes.", "<think>So</think>\n\nYes."])
@pytest.mark.parametrize("prompt", ["assistant:<think>\n", "assistant:", "assistant:<think>\n\n</think>\n"])
def test_kept_reasoning_has_the_mark_of_the_prompt(output: str, prompt: str) -> None:
    whole = output if "</think>" in prompt else "<think>" + output.removeprefix("<think>")
    for tools in ("", "minimax_m2"):
        for parts in ([output], list(output)):
            parser = build("minimax_m2_append_think", tools, b"", prompt)
            assert read(parser, parts) == [ChannelText(CONTENT, 0, whole)]
    call = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'
    parser = build("minimax_m2_append_think", "minimax_m2", b"", prompt)
    assert read(parser, list(output + call)) == [
        ChannelText(CONTENT, 0, whole),
        ChannelText(NAME, 0, "f"),
        ChannelText(ARGUMENTS, 0, "{}"),
    ]


def test_unclosed_reasoning_extends_to_the_end() -> None:
    assert read(build("qwen3", "hermes", b"", ""), ["<think>\na <tool_call> b\n"]) == [
        ChannelText(REASON, 0, "a <tool_call> b\n")
    ]


def test_kimi_calls_end_reasoning() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<think>So<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    assert read(build("kimi_k2", "kimi_k2", b"", ""), [text]) == [
        ChannelText(REASON, 0, "So"),
        ChannelText(NAME, 0, "f"),
        ChannelText(ARGUMENTS, 0, "{}"),
    ]


HARMONY = (
    "<|channel|>analysis<|message|>The user wants rain.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def test_harmony_channels_are_parsed() -> None:
    both = build("openai_gptoss", "openai", b"", "<|start|>assistant")
    assert read(both, list(HARMONY)) == [
        ChannelText(REASON, 0, "The user wants rain."),
        ChannelText(CONTENT, 0, "I look."),
        ChannelText(NAME, 0, "f"),
        ChannelText(ARGUMENTS, 0, '{"a": 1}'),
    ]
    without = read(build("openai_gptoss", "", b"", ""), [HARMONY])
    assert without == [
        ChannelText(REASON, 0, "The user wants rain."),
        ChannelText(CONTENT, 0, 'I look.\n{"a": 1}'),
    ]
    final = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert read(build("openai_gptoss", "", b"", ""), [final]) == [
        ChannelText(REASON, 0, "a"),
        ChannelText(CONTENT, 0, "b"),
    ]
    assert read(build("openai_gptoss", "", b"", ""), ["No header."]) == [
        ChannelText(CONTENT, 0, "No header.")
    ]


def test_a_channel_of_harmony_may_be_written_twice() -> None:
    """gpt-oss-20b sometimes writes a header of commentary, also to itself, before the header of another channel."""
    for first in ("<|channel|>commentary", "<|channel|>commentary to=assistant"):
        thought = f"{first}<|channel|>analysis<|message|>hm<|end|>"
        call = '<|start|>assistant<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        assert read(build("openai_gptoss", "openai", b"", "<|start|>assistant"), list(thought + call)) == [
            ChannelText(REASON, 0, "hm"),
            ChannelText(NAME, 0, "f"),
            ChannelText(ARGUMENTS, 0, '{"a": 1}'),
        ]


@pytest.mark.parametrize("kind", ["json", " JSON", "application/json", "code", ""])
def test_a_content_type_of_harmony_is_no_text(kind: str) -> None:
    text = f'<|channel|>commentary to=functions.f <|constrain|>{kind}<|message|>{{"a": 1}}<|call|>'
    assert read(build("openai_gptoss", "openai", b"", "<|start|>assistant"), list(text)) == [
        ChannelText(NAME, 0, "f"),
        ChannelText(ARGUMENTS, 0, '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("header", "reasoning", "content"),
    [
        ("<|channel|>commentary?commentary?<|end|>", "?commentary?", ""),
        ("<|channel|>?? <|end|>", "?? ", ""),
        ("<|channel|>commentary to=assistant<|channel|>commentary?", None, ""),
        ("<|channel|>final It rains.", "", "It rains."),
        ("<|channel|>final<|message|>It rains.", "", "It rains."),
        ("It rains.", "", "It rains."),
    ],
)
def test_malformed_headers_of_harmony_are_no_content(
    header: str, reasoning: str | None, content: str
) -> None:
    deltas = read(build("openai_gptoss", "openai", b"", "<|start|>assistant"), list(header))
    assert text_of(deltas) == content
    assert reasoning is None or text_of(deltas, REASON) == reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("{o}\nhm{c}Hello.{o}\n{c}", "hm", "Hello."),
        ("Hello.{o}\n{c}", "", "Hello."),
        ("{o}\nhm{c}One.\n{o}\nyes\n{c}\nTwo.", "hm\nyes", "One.Two."),
        ("{o}\nhm{c}Hello.\n{c}", "hm", "Hello."),
        ("Hello.{c}\n", "", "Hello."),
        ("The mark {c} ends it.", "", "The mark {c} ends it."),
        ("thought\nhm{c}Hello.", "hm", "Hello."),
        ("thoughtful", "", "thoughtful"),
    ],
)
def test_gemmas_reasoning_may_follow_content(text: str, reasoning: str, content: str) -> None:
    marks = {"o": "<|channel>thought", "c": "<channel|>"}
    deltas = read(build("gemma", "gemma", b"", ""), list(text.format(**marks)))
    assert (text_of(deltas, REASON), text_of(deltas)) == (reasoning, content.format(**marks))


def test_a_call_follows_gemmas_second_reasoning() -> None:
    text = "<|channel>thought\na<channel|>I look.<|channel>thought\nb<channel|><|tool_call>call:f{a:1}<tool_call|>"
    assert read(build("gemma", "gemma", b"", ""), list(text)) == [
        ChannelText(REASON, 0, "a"),
        ChannelText(CONTENT, 0, "I look."),
        ChannelText(REASON, 0, "\nb"),
        ChannelText(NAME, 0, "f"),
        ChannelText(ARGUMENTS, 0, '{"a": 1}'),
    ]


@pytest.mark.parametrize("kind", ["RESPONSE", "TEXT"])
def test_marks_around_coheres_answer_are_removed(kind: str) -> None:
    answer = f"<|START_{kind}|>It rains.<|END_{kind}|>"
    for thought in ("<|START_THINKING|>hm<|END_THINKING|>", "<|START_THINKING|>hm"):
        assert read(build("cohere_command3", "cohere_command3", b"", ""), list(thought + answer)) == [
            ChannelText(REASON, 0, "hm"),
            ChannelText(CONTENT, 0, "It rains."),
        ]
    assert read(build("cohere_command3", "", b"", ""), [answer]) == [ChannelText(CONTENT, 0, "It rains.")]


PAIRS = [
    ("apertus", "apertus"), ("cohere_command3", "cohere_command3"),
    ("hy_v3", "hy_v3"), ("inkling", "inkling"), ("k2_horizon", "k2_horizon"), ("kimi_k3", "kimi_k3"),
    ("minimax_m3", "minimax_m3"), ("muse_glimmer", "muse_glimmer"),
    ("deepseek_r1", "deepseek_v3"), ("gemma", "gemma"), ("glm45", "glm45"), ("granite", "granite"), ("kimi_k2", "kimi_k2"),
    ("minimax_m2", "minimax_m2"), ("mistral", "mistral"), ("openai_gptoss", "openai"), ("qwen3", "hermes"),
    ("qwen3", "qwen3_coder"), ("seed_oss", "seed_oss"),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "tools"), PAIRS)
def test_pairs_lose_no_text_at_any_division(reasoning: str, tools: str) -> None:
    for seed in FEW:
        check_broken(reasoning, tools, Random(seed))


@pytest.mark.parametrize("names", [*((name, "") for name in REASONING), *(("", name) for name in TOOLS)])
def test_text_without_marks_is_content(names: tuple[str, str]) -> None:
    text = ' It is "fine":\n\n  {x} [y] (z) 1 < 2 <b>bold</b>\n```python\nf(a=1)\n```\n  end \n'
    parser = build(*names, b"", "assistant:</think>")
    if not parser.is_reasoning:
        assert read(parser, list(text)) == [ChannelText(CONTENT, 0, text)]


def test_marks_include_those_of_both_parsers() -> None:
    tools = {"<tools>", "</tools>", "<tool_call>", "</tool_call>"}
    assert marks_of("qwen3", "hermes") == {"<think>", "</think>"} | tools
    assert marks_of("", "") == frozenset()


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', [("f", {"a": "é"})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})], ""),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', [("f", {})], ""),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})], ""),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', [], '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", "Say <tool_call> to me", [], "Say <tool_call> to me"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', [("f", {"a": "</tool_call>"})], ""),
        ("llama3_json", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}\n\nDone.', [("f", {"a": 1})], "Done."),
        ("llama3_json", "Look:\n{\n}", [], "Look:\n{\n}"),
        ("mistral", 'ok[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"a": [1]}', [("f", {"a": [1]})], "ok"),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', [("f", {"a": 1}), ("g", {})], ""),
        ("pythonic", "[f(c=[None, True], d={'k': -1.5}), g()]", [("f", {"c": [None, True], "d": {"k": -1.5}}), ("g", {})], ""),
        ("pythonic", "[link](http://x) and [f(1)]", [], "[link](http://x) and [f(1)]"),
        ("pythonic", "[f(a='''long\n'x' ''', b=(1, 2,), c=r'\\d')]", [("f", {"a": "long\n'x' ", "b": [1, 2], "c": "\\d"})], ""),
        ("pythonic", "[f(a=\"\\ud83d\\ude00\\x41\")]", [("f", {"a": "😀A"})], ""),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [("f", {"a": 1})], ""),
        ("qwen3_coder", "<tool_call><function=f>\n<parameter=a>\nx\n<parameter=b>1</function>", [("f", {"a": "x", "b": 1})], ""),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value></tool_call>", [("f", {"a": "x y"})], ""),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|><|tool_call_end|>", [("f", {})], ""),
        ("phi4_mini_json", "import functools\nfunctools.wraps", [], "import functools\nfunctools.wraps"),
    ],
)  # fmt: skip
def test_example_outputs_are_parsed(
    name: str, text: str, calls: list[tuple[str, object]], content: str
) -> None:
    whole = read(build("", name, b"", ""), [text])
    assert (calls_in(whole), text_of(whole)) == (calls, content)
    assert read(build("", name, b"", ""), list(text)) == whole


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "[NaN, 1e999, 1]", ["NaN", "1e999", 1]),
        ({"type": "array"}, "['\\ud83d']", ["\ufffd"]),
        ({}, "7", 7),
    ],
)
def test_types_in_tags_come_from_the_tools(schema: dict[str, object], text: str, value: object) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"Place": {"type": "object"}}}
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).encode()
    output = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert calls_in(read(build("", "qwen3_coder", tools, ""), [output])) == [("f", {"a": value})]


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"a": {"type": "string"}}}}},
        {
            "anyOf": [
                {"$ref": "#"},
                {"properties": {"a": {"const": "7"}}},
                {"properties": {"b": {"type": "integer"}}},
            ]
        },
        {"properties": {"b": {}}, "allOf": [{"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_types_also_come_from_references_and_alternatives(parameters: dict[str, object]) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).encode()
    output = "<function=f><parameter=a>7</parameter><parameter=b>7</parameter></function>"
    assert calls_in(read(build("", "qwen3_coder", tools, ""), [output])) == [("f", {"a": "7", "b": 7})]


@pytest.mark.parametrize(
    "tools", [b"", b"[", b"[1]", b'{"a": 1}', b'[{"function": {"parameters": {"properties": 3}}}]']
)
def test_tools_without_types_leave_json_values(tools: bytes) -> None:
    output = "<function=f><parameter=a>1</parameter></function>"
    assert calls_in(read(build("", "qwen3_xml", tools, ""), [output])) == [("f", {"a": 1})]


MARKED = [
    name
    for name, form in TOOLS.items()
    if isinstance(form, TagFormat) or (isinstance(form, JsonFormat | LiteralFormat) and form.begins)
]
CALLS: list[Call] = [("get_weather", {"city": "Oslo"}), ("f", {"a": "x"})]


def check_unclosed(
    reasoning: str, tools: str, text: str, calls: list[Call], thought: str, content: str
) -> None:
    """Check the parsed output after a prompt that opens reasoning, at any division into pieces."""
    form = REASONING[reasoning]
    assert isinstance(form, ThinkFormat)
    schemas = schemas_of(CALLS)

    def parser() -> Parser:
        return build(reasoning, tools, schemas, "user:" + form.opens[-1])

    whole = read(parser(), [text])
    assert calls_in(whole) == calls, text
    assert (text_of(whole, Channel.REASONING), text_of(whole)) == (thought, content)
    assert read(parser(), list(text)) == whole
    for end in range(0, len(text), 5):
        one, many = parser(), parser()
        in_pieces = joined(delta for sign in text[:end] for delta in many.push(sign))
        assert joined(one.push(text[:end])) == in_pieces, "the deltas depend on the division of the text"


@pytest.mark.parametrize("tools", MARKED)
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "granite", "mistral", "seed_oss"])
def test_a_call_ends_unclosed_reasoning(reasoning: str, tools: str) -> None:
    form = REASONING[reasoning]
    assert isinstance(form, ThinkFormat)
    for write in WRITERS[tools]:
        if not write(CALLS).startswith(tuple(TOOLS[tools].marks)):
            continue  # another format of calls, without a mark
        text = f"I should look.\n{write(CALLS)}\n"
        check_unclosed(reasoning, tools, text, CALLS, "I should look.", "")
        late = f"{text}{form.closes[0]}\n\nIt rains."
        check_unclosed(reasoning, tools, late, CALLS, "I should look.", "It rains.")


@pytest.mark.parametrize(
    ("tools", "thought"),
    [
        ("hermes", "A <tool_call> would help, <tool_call>{} or not."),
        ("hermes", 'Its form is <tool_call>{"name": 1'),
        ("qwen3_coder", "I write <tool_call> and <function=, then more."),
        ("glm45", "I write <tool_call> with a name and so on."),
        ("kimi_k2", "The section is <|tool_call_begin|> and more <|tool_call_begin|>"),
        ("llama3_json", 'In a line:\n{"name": "f", "parameters": {}}'),
    ],
)
def test_a_call_mark_without_a_call_is_reasoning(tools: str, thought: str) -> None:
    check_unclosed("qwen3", tools, f"{thought}</think>Yes.", [], thought, "Yes.")


def test_a_call_in_unclosed_reasoning_may_contain_the_closing_mark() -> None:
    call: Call = ("f", {"a": "x </think> y"})
    check_unclosed("qwen3", "hermes", "So.\n" + WRITERS["hermes"][0]([call]), [call], "So.", "")


def test_a_truncated_call_in_unclosed_reasoning_is_dropped() -> None:
    parser = build("qwen3", "hermes", b"", "user:<think>")
    deltas = joined(parser.push('So.\n<tool_call>{"name": "f') + parser.finish(is_cut=True))
    assert [(delta.channel, delta.text) for delta in deltas] == [(Channel.REASONING, "So.")]


def test_a_header_ends_unclosed_harmony_reasoning() -> None:
    text = "<|channel|>analysis<|message|>So.<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    deltas = read(build("openai_gptoss", "openai", b"", ""), list(text))
    assert (text_of(deltas, Channel.REASONING), calls_in(deltas), text_of(deltas)) == ("So.", [("f", {})], "")
