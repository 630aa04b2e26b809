"""Grammars of required tool calls and grammars after reasoning, in every format: accepted texts, rejected texts, parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from llguidance import LLTokenizer
from tests.text.test_structured import takes
from tokenizers import AddedToken, Tokenizer

from quintet.detokenizer_proc.parsers.forced import FORCED, forced_calls, think_marks
from quintet.detokenizer_proc.parsers.registry import REASONING
from quintet.frontend.api.openai.tools import form_of_calls, form_or_calls
from quintet.frontend.api.openai.types import ChatBody
from quintet.process.grammars import named_tokens, open_vocabulary
from quintet.tokenizer_proc.structured import Forms
from quintet.wire.config import ForcedCalls, ModelConfig, ParsersConfig
from quintet.wire.params import SamplingParams
from quintet.wire.request import OutputParsing, RequestSpec
from quintet.wire.structured import StructuredOutputsParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "rain",
            "parameters": {"properties": {"days": {"type": "integer"}}, "required": ["days"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WHOLE = [("rain", '{"days": 3}'), ("now", '{"at": "x"}')]
WRONG = [("rain", '{"days": "3"}'), ("rain", '{"days": 3, "b": 1}'), ("snow", "{}"), ("now", "[]")]


class Vocabulary(NamedTuple):
    """A model's vocabulary as the library reads it, and the tokens that are written by their names."""

    tokens: LLTokenizer
    named: dict[str, int]

    def takes(self, grammar: str, text: str) -> bool:
        return takes(self.tokens, grammar, text, self.named)


Vocabularies = Callable[[ModelConfig], Vocabulary]


@pytest.fixture(scope="module")
def vocabulary_of() -> Vocabularies:
    """Opens each model's vocabulary once: it takes a moment."""
    known: dict[str, Vocabulary] = {}

    def open_once(model: ModelConfig) -> Vocabulary:
        if (path := model.tokenizer_path) not in known:
            known[path] = Vocabulary(open_vocabulary(model), named_tokens(model))
        return known[path]

    return open_once


@pytest.fixture
def model(model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]) -> ModelConfig:
    return model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1])


def compiled(
    model: ModelConfig, form: StructuredOutputsParams, parsing: OutputParsing | None = None, prompt: str = ""
) -> str:
    spec = RequestSpec(SamplingParams(structured_outputs=form.checked()), 0, 0, parsing=parsing)
    found = Forms(model, is_mock=False).enforceable(spec, lambda: prompt).structured_outputs
    assert found is not None
    return found.compiled


def written(how: ForcedCalls, *calls: tuple[str, str]) -> str:
    each = (how.call_begin + name + how.name_end + arguments + how.call_end for name, arguments in calls)
    return how.begin + how.separator.join(each) + how.end


def body(choice: Any, **more: Any) -> ChatBody:
    sent = {"messages": [], "tools": TOOLS, "tool_choice": choice, **more}
    return msgspec.json.decode(json.dumps(sent), type=ChatBody)


@pytest.mark.parametrize("name", ["hermes", *FORCED])
def test_every_format_takes_its_calls_alone(
    name: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    how = forced_calls("", name)
    form = form_of_calls(body("required"), how)
    assert form is not None
    grammar, vocabulary = compiled(model, form), vocabulary_of(model)
    assert all(vocabulary.takes(grammar, written(how, call)) for call in WHOLE)
    assert vocabulary.takes(grammar, written(how, *WHOLE)) == (not how.is_single)
    assert not any(
        vocabulary.takes(grammar, text) for text in ["", "It rains.", *(written(how, call) for call in WRONG)]
    )


def test_a_named_function_is_called_once(model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    how, vocabulary = forced_calls("", "hermes"), vocabulary_of(model)
    named = form_of_calls(body({"type": "function", "function": {"name": "now"}}), how)
    single = form_of_calls(body("required", parallel_tool_calls=False), how)
    assert named is not None and single is not None
    rain, now = (written(how, call) for call in WHOLE)
    assert vocabulary.takes(compiled(model, named), now)
    assert not vocabulary.takes(compiled(model, named), rain)
    assert vocabulary.takes(compiled(model, single), rain)
    assert not vocabulary.takes(compiled(model, single), written(how, *WHOLE))


def test_a_tool_whose_schema_is_combined_can_be_called(
    model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    other = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}
    parameters = {"properties": {"a": {"const": 1}}, "required": ["a"], "anyOf": [other]}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    how, vocabulary = forced_calls("", "hermes"), vocabulary_of(model)
    form = form_of_calls(body("required", tools=tools), how)
    assert form is not None
    grammar = compiled(model, form)
    assert vocabulary.takes(grammar, written(how, ("now", '{"a": 1, "b": 2}')))
    assert not vocabulary.takes(grammar, written(how, ("now", '{"a": 1}')))


ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
JSON = '{"answer": "yes"}'


def either(
    name: str, choice: str | None = "auto", **more: Any
) -> tuple[StructuredOutputsParams, ForcedCalls]:
    """Return the form of a request with a schema and tools, for a model of this format, and how its calls are written."""
    how = forced_calls("openai_gptoss" if name == "openai" else "", name)
    form = StructuredOutputsParams(json=ANSWER, disable_additional_properties=True).checked()
    found = form_or_calls(form, body(choice, **more), ParsersConfig(tools=name, forced=how))
    assert found is not None
    return found, how


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", *FORCED])
def test_a_schema_beside_tools_leaves_room_for_calls(
    name: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    form, how = either(name)
    grammar, vocabulary = compiled(model, form), vocabulary_of(model)
    assert vocabulary.takes(grammar, JSON)
    assert all(vocabulary.takes(grammar, written(how, call)) for call in WHOLE)
    assert vocabulary.takes(grammar, written(how, *WHOLE)) == (not how.is_single)
    unknown = written(how, ("snow", "{}"))
    assert not any(
        vocabulary.takes(grammar, text)
        for text in ["", "It rains.", '{"answer": 1}', unknown, JSON + written(how, WHOLE[0])]
    )


@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss"])
def test_calls_in_the_place_of_a_schema_stand_behind_reasoning(
    reasoning: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    tools = "openai" if reasoning == "openai_gptoss" else "hermes"
    form, how = either(tools)
    marks = think_marks(reasoning)
    assert marks is not None
    thinks = msgspec.structs.replace(model, parsers=ParsersConfig(reasoning=reasoning, thinks=marks))
    grammar = compiled(thinks, form, OutputParsing(reasoning, how.reader), "user:" + marks.opens[0])
    vocabulary, thought = vocabulary_of(model), "so" + marks.closes[0]
    assert vocabulary.takes(grammar, thought + marks.answer + JSON)
    assert vocabulary.takes(grammar, thought + written(how, WHOLE[0]))
    assert not vocabulary.takes(grammar, thought + "It rains.")


def test_many_tools_do_not_make_a_schema_unenforceable(
    model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    many = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"not": {}}}} for i in range(200)
    ]
    form, how = either("hermes", tools=many)
    grammar = compiled(model, form)
    assert vocabulary_of(model).takes(grammar, written(how, ("tool_199", '{"a": 1}')))


@pytest.mark.parametrize(
    ("form", "choice", "tools"),
    [
        (StructuredOutputsParams(json=ANSWER), "none", "hermes"),
        (StructuredOutputsParams(json=ANSWER), "auto", ""),
        (StructuredOutputsParams(regex="a"), "auto", "hermes"),
    ],
)
def test_a_form_stays_alone_where_no_call_may_come(
    form: StructuredOutputsParams, choice: str, tools: str
) -> None:
    assert form_or_calls(form, body(choice), ParsersConfig(tools=tools)) is form


FORMS = {
    "json": (StructuredOutputsParams(json={"type": "integer"}), "12"),
    "lark": (StructuredOutputsParams(grammar='start: a\na: "1" "2"'), "12"),
    "choice": (StructuredOutputsParams(choice=["12", "no"]), "12"),
    "tags": (
        StructuredOutputsParams(structural_tag={"format": {"type": "const_string", "value": "12"}}),
        "12",
    ),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_is_of_what_follows_reasoning(
    kind: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    form, text = FORMS[kind]
    vocabulary = vocabulary_of(model)
    thinks = msgspec.structs.replace(
        model, parsers=ParsersConfig(reasoning="qwen3", thinks=think_marks("qwen3"))
    )

    def is_taken(answer: str, prompt: str) -> bool:
        return vocabulary.takes(compiled(thinks, form, OutputParsing("qwen3"), prompt), answer)

    assert is_taken(text, "user:") and is_taken(f"<think>so 13</think>\n\n{text}", "user:")
    assert not is_taken(f"so 13</think>\n\n{text}", "user:") and not is_taken("<think>so</think>x", "user:")
    assert is_taken(f"so 13</think>\n{text}", "user:<think>\n") and not is_taken(text, "user:<think>\n")
    assert is_taken(text, "user:<think></think>\n")
    assert not is_taken(f"<think>so</think>{text}", "user:<think></think>\n")
    assert not vocabulary.takes(compiled(thinks, form, None, "user:"), f"<think>so</think>{text}")


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize("reasoning", REASONING)
def test_every_format_of_reasoning_stands_before_calls(
    reasoning: str,
    special: bool | None,
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
    vocabulary_of: Vocabularies,
) -> None:
    """Whether its marks are text, or tokens of the one kind or of the other."""
    marks, how = think_marks(reasoning), forced_calls(reasoning, "")
    assert marks is not None
    tokenizer = Tokenizer.from_str(tokenizers_by_style["byte_level"].to_str())
    if special is not None:
        names = re.findall(
            r"<\S+?>|\[\S+?\]", " ".join([*marks.opens, *marks.closes, marks.answer, how.call_begin])
        )
        tokenizer.add_tokens([AddedToken(name, special=special) for name in names])
    model = model_of(tokenizer, eos_token_ids=[1])
    form = form_of_calls(body("required"), how)
    assert form is not None
    thinks = msgspec.structs.replace(
        model, parsers=ParsersConfig(reasoning=reasoning, thinks=marks, forced=how)
    )
    opening, closing = marks.opens[-1], marks.closes[-1]
    grammar = compiled(
        thinks, form, OutputParsing(reasoning, how.reader, requires_calls=True), "user:" + opening
    )
    call = written(how, WHOLE[0])
    assert vocabulary_of(model).takes(grammar, f"so{closing}{call}")
    assert not vocabulary_of(model).takes(grammar, f"so{closing}It rains.")
