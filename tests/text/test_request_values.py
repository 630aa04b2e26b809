"""Structured outputs and messages with a random JSON value in any field: compiled or rejected, without another exception."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.structured import Forms
from quintet.wire.chat import check_messages, encode_messages
from quintet.wire.codec import UNREADABLE
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import ChatPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.structured import StructuredOutputsParams

NUM_TRIES = 60
"""Changed documents of each kind in one test."""
TAG = {"begin": "<a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</a>"}
FORMATS: list[Any] = [
    {
        "type": "triggered_tags",
        "triggers": ["<a"],
        "tags": [TAG],
        "at_least_one": True,
        "stop_after_first": False,
    },
    {
        "type": "tags_with_separator",
        "separator": ",",
        "tags": [TAG, {**TAG, "content": {"type": "any_text"}}],
    },
    {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "x"},
            {"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, {"type": "any_text"}]},
            {"type": "tag", **TAG},
        ],
    },
]
TAGS = [
    *({"type": "structural_tag", "format": each} for each in FORMATS),
    {"structures": [{"begin": "<a>", "schema": {"type": "string"}, "end": "</a>"}], "triggers": ["<a"]},
]
UNION = [
    {
        "type": "object",
        "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
        "required": ["kind"],
    },
    {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
    {"$ref": "#/$defs/a"},
]
SCHEMAS: list[Any] = [
    {"oneOf": UNION, "discriminator": {"propertyName": "kind"}, "$defs": {"a": {"anyOf": [{"type": "null"}]}}},
    {
        "type": "object",
        "properties": {
            "set": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
            "some": {"type": "array", "contains": {}, "minContains": 1, "maxContains": 3, "maxItems": 5},
            "names": {"type": "object", "propertyNames": {"pattern": "^a", "minLength": 1, "maxLength": 4}},
            "text": {"type": ["string", "null"], "not": {"type": "null"}, "format": "email", "minLength": 2},
            "other": {"if": {}, "then": {"type": "integer"}, "else": True, "default": 1},
        },
        "required": ["set"],
        "dependentRequired": {"set": ["some"]},
        "unevaluatedProperties": False,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
]  # fmt: skip
MESSAGES: list[Any] = [
    [
        {"role": "system", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "user", "content": "x", "name": "n"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}],
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}},
                {"id": "call_2", "type": "custom", "custom": {"name": "g", "input": "i"}},
            ],
            "thinking_blocks": [{"type": "thinking", "thinking": "t"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
        {"role": "system", "content": "late"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": {}}, "reasoning_content": "r"},
    ]
]
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        5,
        1 << 62,
        1 << 80,
        0.5,
        1e300,
        "",
        "a",
        "<a",
        "(",
        "object",
        "#/$defs/a",
        "{{",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        [5],
        ["a"],
        {"type": []},
        {"type": "any_text"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
    ),
]
"""Values of every JSON type."""
SCHEMA_KEYS = (
    "type",
    "$ref",
    "oneOf",
    "anyOf",
    "enum",
    "const",
    "items",
    "not",
    "required",
    "properties",
    "pattern",
)


def deep(rng: Random) -> Any:
    """Return a value of many levels."""
    value: Any = copy.deepcopy(rng.choice(VALUES))
    for _ in range(rng.choice((10, 90, 400))):
        value = {rng.choice(SCHEMA_KEYS): value} if rng.random() < 0.5 else [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every inner value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(document: Any, rng: Random) -> Any:
    """Return a copy with one to three random values, some of them moved from elsewhere in the document."""
    document = copy.deepcopy(document)
    for _ in range(rng.randrange(1, 4)):
        container, key = rng.choice(list(places(document)))
        other, other_key = rng.choice(list(places(document)))
        if isinstance(container, dict) and rng.random() < 0.2:
            key = rng.choice((*SCHEMA_KEYS, "content", "thinking"))
        container[key] = copy.deepcopy(rng.choice(VALUES) if rng.random() < 0.7 else other[other_key])
    if rng.random() < 0.1:
        container[key] = deep(rng)
    return document


@pytest.fixture
def forms(model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]) -> Forms:
    return Forms(model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1]), is_mock=False)


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
@pytest.mark.parametrize("seed", range(2))
def test_structured_outputs_are_compiled_or_rejected(kind: str, seed: int, forms: Forms) -> None:
    rng = Random(seed)
    for _ in range(NUM_TRIES):
        document = changed(rng.choice(SCHEMAS if kind == "json" else TAGS), rng)
        with contextlib.suppress(
            RequestError, *UNREADABLE
        ):  # of deep values, and of integers of more than 64 bits
            form = StructuredOutputsParams(**{kind: document})
            forms.compiled(msgspec.structs.replace(SamplingParams(), structured_outputs=form).checked())


@pytest.mark.parametrize(
    "template", ["{{ messages | tojson }}", "{{ messages[0].content + messages[0].role }}"]
)
@pytest.mark.parametrize("seed", range(2))
def test_messages_are_rendered_or_rejected(template: str, seed: int) -> None:
    rng = Random(seed)
    templates = ChatTemplates({"default": template}, {})
    for _ in range(NUM_TRIES):
        messages = changed(rng.choice(MESSAGES), rng)
        is_continued = rng.random() < 0.2
        with contextlib.suppress(RequestError, *UNREADABLE):
            check_messages(messages)  # as the sender does
            prompt = ChatPrompt(
                encode_messages(messages),
                add_generation_prompt=not is_continued,
                continue_final_message=is_continued,
            )
            templates.render(prompt)
