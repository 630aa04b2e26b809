"""Parsers of calls and of reasoning: written outputs, broken outputs and any division into pieces."""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from tests.text.outputs import WRITERS, Call

from quintet.detokenizer_proc.parsers.forced import forced_calls
from quintet.detokenizer_proc.parsers.formats import TOOLS
from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser, joined
from quintet.detokenizer_proc.parsers.registry import build
from quintet.wire.channels import Channel

FEW, MANY = range(25), range(25, 425)
"""Seeds of random outputs."""

TEXTS = [
    "", "x", "Paris", "it's \"quoted\"", "a\nb\n", "C:\\new\\table", "</tool", "}]", "日本 😀", "\x00\x7f", '{"a": 1}', " blank ",
    "<b>5 < 6</b>", "true", "12", "[TOOL", "a=b, c:d",
]  # fmt: skip
NAMES = ["f", "get_weather", "a_long_name_of_a_function", "g2"]
SCALARS = [None, True, False, 0, -7, 12345678901234567890, 1.5, -2e-9, 1e22]


def value_of(random: Random, depth: int = 0) -> Any:
    match random.randrange(5 if depth < 2 else 3):
        case 0:
            return random.choice(SCALARS)
        case 1 | 2:
            return random.choice(TEXTS)
        case 3:
            return [value_of(random, depth + 1) for _ in range(random.randrange(3))]
        case _:
            return arguments_of(random, depth + 1)


def arguments_of(random: Random, depth: int = 0) -> dict[str, Any]:
    return {
        key: value_of(random, depth)
        for key in random.sample(["a", "city", "is_on", "b_2"], random.randrange(4))
    }


def schemas_of(calls: Sequence[Call]) -> bytes:
    """Return the request's tools, for calls with distinct names."""
    types = {
        str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"
    }  # fmt: skip
    tools = []
    for name, arguments in calls:
        properties = {key: {"type": types[type(value)]} for key, value in arguments.items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return json.dumps(tools).encode()


def read(parser: Parser, parts: Sequence[str]) -> list[ChannelText]:
    return joined([delta for part in parts for delta in parser.push(part)] + parser.finish())


def text_of(deltas: Sequence[ChannelText], channel: Channel = Channel.CONTENT) -> str:
    return "".join(delta.text for delta in deltas if delta.channel is channel)


def calls_in(deltas: Sequence[ChannelText]) -> list[tuple[str, Any]]:
    names = {delta.call: delta.text for delta in deltas if delta.channel is Channel.NAME}
    arguments = dict.fromkeys(names, "")
    for delta in deltas:
        if delta.channel is Channel.ARGUMENTS:
            arguments[delta.call] += delta.text
    return [(names[call], json.loads(arguments[call])) for call in sorted(names)]


def check_written(name: str, seed: int) -> None:
    random = Random(seed)
    write = random.choice(WRITERS[name])
    calls = [(function, arguments_of(random)) for function in random.sample(NAMES, random.randint(1, 3))]
    before = random.choice(["", "Some words first."])
    text = before + write(calls) + "\n"
    deltas = read(build("", name, schemas_of(calls), ""), [text])
    assert calls_in(deltas) == calls, text
    assert text_of(deltas).strip() == before, text


@pytest.mark.parametrize("name", TOOLS)
def test_written_calls_are_parsed(name: str) -> None:
    for seed in FEW:
        check_written(name, seed)


@pytest.mark.whole
@pytest.mark.parametrize("name", TOOLS)
def test_many_written_calls_are_parsed(name: str) -> None:
    for seed in MANY:
        check_written(name, seed)


@pytest.mark.parametrize("name", ["", *TOOLS])
def test_required_calls_have_the_format_of_the_parser(name: str) -> None:
    call_format = forced_calls("", name)
    assert name in {"", call_format.reader} or call_format.reader == "hermes"
    calls = [("get_weather", {"city": "Oslo"}), ("f", {"a": [1, "}"], "b": {}})][
        : 1 if call_format.is_single else 2
    ]
    written = [
        call_format.call_begin + function + call_format.name_end + json.dumps(a) + call_format.call_end
        for function, a in calls
    ]
    text = call_format.begin + call_format.separator.join(written) + call_format.end
    deltas = read(build("", call_format.reader, b"", ""), list(text))
    assert (calls_in(deltas), text_of(deltas)) == (calls, "")


def parse_truncated(name: str, text: str, schemas: bytes = b"") -> list[ChannelText]:
    """Parse an output that was truncated at its length limit."""
    parser = build("", name, schemas, "")
    return joined(parser.push(text) + parser.finish(is_cut=True))


MAX_UNSURE = {
    **dict.fromkeys(("llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "phi4_mini_json"), 40),
    "openai": 30,
    "xlam": 50,
}
"""Characters of a truncated call that may be content: part of a mark, or the name in a bare call."""


@pytest.mark.parametrize("name", TOOLS)
def test_a_truncated_call_is_not_content(name: str) -> None:
    calls: list[Call] = [("get_weather", {"city": "Oslo", "days": 3}), ("f", {"a": [1, "x"]})]
    before, schemas = "Some words first.", schemas_of(calls)
    for write in WRITERS[name]:
        text = before + write(calls)
        for end in range(len(before), len(text) + 1):
            content = text_of(parse_truncated(name, text[:end], schemas)).removeprefix(before)
            is_unsure = end - len(before) <= MAX_UNSURE.get(name, 12)
            assert is_unsure or not content.strip(), (text[:end], content)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", '<tool_call>\n{"name": "', ""),
        ("hermes", 'Yes.\n<tool_call>{"name": "f", "arguments": {}}</tool_ca', "Yes."),
        ("hermes", "if a <", "if a <"),
        ("hermes", "Write <tool_call>like this</tool_call", "Write <tool_call>like this</tool_call"),
        ("llama3_json", '{"name": "f", "parameters": ', ""),
        ("llama3_json", '{"name": "Bob", "age": ', '{"name": "Bob", "age": '),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"na', ""),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_v", ""),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para", ""),
        ("openai", "<|channel|>commentary to=functions.f", ""),
    ],
)
def test_text_outside_a_truncated_call_is_content(name: str, text: str, content: str) -> None:
    assert text_of(parse_truncated(name, text)) == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}'),
        ("hermes", '<tool_call>{{"name": "f", "arguments": {"a": "x"}}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"}[/TOOL_CALLS]'),
        ("glm45", "<tool_call>fa</arg_key><arg_value>x</arg_value></tool_call>"),
        ("glm45", "<tool_call>f a</arg_key>\n<arg_value>x</arg_value></tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></arg_key><arg_value>x</arg_value></tool_call>"),
        ("glm45", "<tool_call>f<arg_key><arg_key>a</arg_key>x</arg_value></tool_call>"),
    ],
)
def test_calls_with_usual_mistakes_are_complete(name: str, text: str) -> None:
    schemas = b'[{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]'
    for parts in ([text], text):
        deltas = read(build("", name, schemas, ""), parts)
        assert (calls_in(deltas), text_of(deltas).strip()) == ([("f", {"a": "x"})], "")


WORD = re.compile(r"w[0-9]+w")
"""Words that no format uses: every one in an output must be in the parsed deltas."""
FRAGMENTS = [
    "", "", "", "{", "}", "[", "]", '"', "'", "\\", ",", ":", "=", "(", ")", "<", "\n", " ", "\\u00e9", "\\ud83d", "null",
    "<tool_call>", "</tool_call>", "```", "<think>", "</think>", "name", '"name": ', "&lt;", "日本", "😀",
]  # fmt: skip


def broken_output(name: str, random: Random) -> str:
    """Return words, calls and words, with characters removed and others inserted."""
    numbers = itertools.count(10)

    def words() -> str:
        return " ".join(f"w{next(numbers)}w" for _ in range(random.randint(1, 2)))

    def call() -> Call:
        values = [words(), [words()], {"inner": words()}]
        return words().split()[0], {
            key: random.choice(values) for key in random.sample(["a", "city"], random.randrange(3))
        }

    text = ""
    for _ in range(random.randint(1, 2)):
        calls = [call() for _ in range(random.randrange(3))]
        text += words() + random.choice(["\n", " "]) + (random.choice(WRITERS[name])(calls) if calls else "")
    for _ in range(random.randrange(4)):
        begin = random.randint(0, len(text))
        text = text[:begin] + random.choice(FRAGMENTS) + text[begin + random.randrange(20) :]
    return text[: random.randint(0, len(text))] if random.randrange(2) else text


def check_broken(reasoning: str, tools: str, random: Random) -> None:
    text = broken_output(tools, random)
    schemas = b'[{"function": {"name": "w1w", "parameters": {"properties": {"a": {"type": "string"}}}}}]'

    def parser() -> Parser:
        return build(reasoning, tools, schemas, "")

    at = sorted(random.randint(0, len(text)) for _ in range(random.choice([1, 8, 2 * len(text)])))
    parts = [text[begin:end] for begin, end in itertools.pairwise([0, *at, len(text)])]
    whole = read(parser(), [text])
    assert read(parser(), parts) == whole, parts
    # The deltas sent for a prefix depend on that prefix only, so that another process can resume there.
    half = parts[: len(parts) // 2]
    parser_of_parts = parser()
    assert joined(delta for part in half for delta in parser_of_parts.push(part)) == joined(
        parser().push("".join(half))
    ), parts
    assert all(delta.text for delta in whole), text
    found = "\n".join(delta.text for delta in whole)
    found.encode()
    everything = "".join(delta.text for delta in whole)
    lost = [word for word in WORD.findall(text) if word not in found and word not in everything]
    assert not lost, text


ARRAY = {"properties": {"x": {"type": "array"}}}
REFERENCES = {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 60}}
TYPED = "<tool_call>\n<function=f>\n<parameter=x>\n"
"""Begins a value that is converted as a whole."""
SCALE = 10


@pytest.mark.parametrize(
    ("reasoning", "tools", "parameters", "parts"),
    [
        ("openai_gptoss", "openai", {}, lambda n: [*["\n"] * n * 10_000, "w1w"]),
        ("deepseek_r1", "hermes", {}, lambda n: [*["\n"] * n * 10_000, "w1w"]),
        ("", "hermes", {}, lambda n: ["w1w", *["\n"] * n * 10_000, "w2w"]),
        (
            "deepseek_r1",
            "hermes",
            {},
            lambda n: ['w1w<tool_call>{"a": "', *["<tool_call>"] * n * 1_000, "</think>w2w"],
        ),
        ("deepseek_r1", "hermes", {}, lambda n: [*["<tool_call>"] * n * 500, "w1w"]),
        ("deepseek_r1", "glm45", {}, lambda n: [*["<tool_call>"] * n * 60, "w1w"]),
        ("", "pythonic", {}, lambda n: ["[f(x=w1w", *["' "] * n * 3_000]),
        ("", "qwen3_coder", ARRAY, lambda n: [TYPED, "['w1w ", *["\\n"] * n * 10_000, "']"]),
        ("", "qwen3_coder", ARRAY, lambda n: [TYPED, "[w1w", *["'a"] * n * 3_000, "]"]),
        ("", "qwen3_coder", ARRAY, lambda n: [TYPED, "['w1w',", *["'a',"] * n * 5_000, "]"]),
        ("", "hermes", {}, lambda n: ['<tool_call>{"name": "w1w"}</tool_call>' * n * 500]),
        (
            "qwen3",
            "qwen3_coder",
            {},
            lambda n: ["<tool_call><function=w1w><parameter=a>x</parameter></function>" * n * 500],
        ),
        ("", "pythonic", {}, lambda n: ["[f(x=w1w)]\n" * n * 500]),
        ("", "pythonic", {}, lambda n: ["😀\n" * n * 5_000 + "w1w"]),
    ],
)
def test_work_is_linear(
    reasoning: str, tools: str, parameters: dict[str, object], parts: Callable[[int], Sequence[str]]
) -> None:
    schemas = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).encode()
    seconds = dict[int, float]()
    for scale in (1, SCALE):
        text = parts(scale)
        gc.disable()  # it visits all objects of earlier tests
        began_s = time.process_time()
        for _ in range(SCALE // scale):
            deltas = read(build(reasoning, tools, schemas, ""), text)
        seconds[scale] = time.process_time() - began_s
        gc.enable()
        assert WORD.findall("".join(delta.text for delta in deltas)) == WORD.findall("".join(text))
    assert seconds[SCALE] < 3 * seconds[1] + 0.5, (
        seconds
    )  # the same amount of text; quadratic work takes 10 times as long


def test_long_headers_and_recursive_schemas_take_little_time() -> None:
    """Exponential work would not end."""
    recursive = {"$defs": REFERENCES, "properties": {"x": {"$ref": "#/$defs/a"}}}
    schemas = json.dumps([{"type": "function", "function": {"name": "f", "parameters": recursive}}]).encode()
    assert read(build("", "qwen3_coder", schemas, ""), ["w1w"])
    assert read(build("openai_gptoss", "openai", b"[]", ""), ["<|start|>" + " " * 60 + "w1w<|message|>"])


@pytest.mark.parametrize("name", TOOLS)
def test_broken_calls_lose_no_text_at_any_division(name: str) -> None:
    for seed in FEW:
        check_broken("", name, Random(seed))


@pytest.mark.whole
@pytest.mark.parametrize("name", TOOLS)
def test_many_broken_calls_lose_no_text_at_any_division(name: str) -> None:
    for seed in MANY:
        check_broken("", name, Random(seed))
