"""Structured outputs of a real server with the `openai` package, and a kill of the executor."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.processes.server import Server, serve

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 3, "maxItems": 5},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "parts", "kind"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Describe a thing."}],
    "max_tokens": 200,
    "seed": 3,
}
LONG = {"regex": "([a-z]{3}-[0-9]{2} ){40}"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(
        *("--kv-cache-memory", "64MiB", "--max-model-len", "512", "--served-model-name", "m")
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def check(text: str) -> None:
    thing = json.loads(text)
    assert set(thing) == {"name", "parts", "kind"}
    assert len(thing["name"]) <= 12 and thing["kind"] in {"small", "large"}
    assert 3 <= len(thing["parts"]) <= 5 and all(0 <= part <= 999 for part in thing["parts"])


def test_json_schema_is_enforced_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, response_format=FORMAT, temperature=1.0)
    [choice] = whole.choices
    assert choice.finish_reason == "stop"
    check(choice.message.content)
    stream = client.chat.completions.create(**ASK, response_format=FORMAT, temperature=1.0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_required_tool_calls_match_the_schema(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "make", "parameters": SCHEMA}}
    other = {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}}
    ask = {**ASK, "tools": [named, other], "parallel_tool_calls": False, "max_tokens": 400}
    for choice in ("required", {"type": "function", "function": {"name": "make"}}):
        answer = client.chat.completions.create(**ask, tool_choice=choice).choices[0]
        (call,) = answer.message.tool_calls or []
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        if call.function.name == "make":
            check(call.function.arguments)
        else:
            assert (choice, call.function.name, json.loads(call.function.arguments)) == (
                "required",
                "stop",
                {},
            )
        with client.chat.completions.stream(**ask, tool_choice=choice) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert (streamed.function.name, streamed.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )


class Wheel(pydantic.BaseModel):
    size: int = pydantic.Field(ge=0, le=99)
    material: Literal["steel", "wood"] | None


class Cart(pydantic.BaseModel):
    owner: str = pydantic.Field(max_length=9)
    wheels: list[Wheel] = pydantic.Field(max_length=2)


def test_pydantic_class_is_a_schema(client: openai.OpenAI) -> None:
    """Nested classes become references, and None one of several types."""
    answer = client.chat.completions.parse(**ASK, response_format=Cart, temperature=1.0)
    cart = answer.choices[0].message.parsed
    assert isinstance(cart, Cart) and len(cart.wheels) <= 2


def test_each_choice_matches_the_schema(client: openai.OpenAI) -> None:
    """With other sampling parameters, in a batch with an unconstrained request that stays unchanged."""
    plain = {**ASK, "max_tokens": 32, "temperature": 0}
    alone = client.chat.completions.create(**plain).choices[0].message.content
    unconstrained: list[str] = []
    thread = threading.Thread(
        target=lambda: unconstrained.append(
            client.chat.completions.create(**plain).choices[0].message.content
        )
    )
    thread.start()
    answer = client.chat.completions.create(
        **ASK,
        n=3,
        response_format=FORMAT,
        logprobs=True,
        top_logprobs=2,
        frequency_penalty=0.5,
        extra_body={"min_tokens": 5, "top_k": 50, "bad_words": ["{"]},
    )
    thread.join()
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.logprobs.content
        check(choice.message.content)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert unconstrained == [alone]


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "[ab]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "maybe not"]}}, "yes|maybe not"),
        ({"structured_outputs": {"grammar": 'root ::= ("x" | "yz") [0-9]'}}, "(x|yz)[0-9]"),
        ({"guided_regex": "q{1,5}w"}, "q{1,5}w"),
        ({"guided_choice": ["one"]}, "one"),
        (
            {"structured_outputs": {"json_object": True}, "logit_bias": {"0": -100}, "max_tokens": 20},
            r"\{(.|\n)*",
        ),
    ],
)
def test_completions_take_all_constraint_kinds(
    client: openai.OpenAI, constraint: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(
        model="m", prompt="Say", max_tokens=40, temperature=1.0, seed=1, extra_body=constraint
    )
    assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0]


def test_unsupported_schema_keyword_is_rejected(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(model="m", prompt="x", extra_body={"guided_json": schema})


@pytest.mark.whole  # tests/models/test_structured.py tests the replacement without processes
def test_executor_kill_keeps_structured_output(server: Server, client: openai.OpenAI) -> None:
    """The new executor rebuilds the matcher from the outputs."""
    ask = {"model": "m", "prompt": "Say", "max_tokens": 400, "temperature": 1.0, "seed": 8}
    body = {**ask, "extra_body": {"structured_outputs": LONG}}
    undisturbed = client.completions.create(**body).choices[0].text  # type: ignore[call-overload]
    pieces: list[str] = []
    for chunk in client.completions.create(**body, stream=True):  # type: ignore[call-overload]
        pieces.append(chunk.choices[0].text)
        if len(pieces) == 10:
            server.children()["quintet-executor-0"].kill()
    assert "".join(pieces) == undisturbed
    assert re.fullmatch(LONG["regex"], undisturbed)
