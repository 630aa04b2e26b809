"""Structured outputs from a real server, as the openai package asks for them; the executor dies in the middle of one."""

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


def test_a_schema_holds_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, response_format=FORMAT, temperature=1.0)
    [choice] = whole.choices
    assert choice.finish_reason == "stop"
    check(choice.message.content)
    stream = client.chat.completions.create(**ASK, response_format=FORMAT, temperature=1.0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_calls_that_are_insisted_on_are_there_and_parse(client: openai.OpenAI) -> None:
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


def test_a_class_of_pydantic_is_a_schema(client: openai.OpenAI) -> None:
    """Classes within classes become references, and None one of several types."""
    answer = client.chat.completions.parse(**ASK, response_format=Cart, temperature=1.0)
    cart = answer.choices[0].message.parsed
    assert isinstance(cart, Cart) and len(cart.wheels) <= 2


def test_choices_of_one_request_each_have_the_form(client: openai.OpenAI) -> None:
    """And with all else that changes or reports draws; beside one without a form, which stays as it is alone."""
    plain = {**ASK, "max_tokens": 32, "temperature": 0}
    alone = client.chat.completions.create(**plain).choices[0].message.content
    beside: list[str] = []
    thread = threading.Thread(
        target=lambda: beside.append(client.chat.completions.create(**plain).choices[0].message.content)
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
    assert beside == [alone]


@pytest.mark.parametrize(
    ("form", "pattern"),
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
def test_completions_take_every_kind(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model="m", prompt="Say", max_tokens=40, temperature=1.0, seed=1, extra_body=form
    )
    assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0]


def test_what_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(model="m", prompt="x", extra_body={"guided_json": schema})


@pytest.mark.whole  # tests/models/test_structured.py has another executor go on, without processes
def test_the_executor_dies_in_the_middle_of_a_form(server: Server, client: openai.OpenAI) -> None:
    """The next one builds the matcher from the outputs: the same bytes as without it."""
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
