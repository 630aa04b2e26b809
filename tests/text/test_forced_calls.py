"""Grammars of required tool calls and grammars after reasoning, in every format: accepted and rejected texts, parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from llguidance import LLTokenizer
from tests.text.test_structured import accepts
from tokenizers import AddedToken, Tokenizer

from quintet.detokenizer_proc.parsers.forced import FORCED, forced_calls, think_marks
from quintet.detokenizer_proc.parsers.formats import REASONING
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
    """A model's vocabulary in llguidance, and the tokens that grammars refer to by name."""

    tokens: LLTokenizer
    named: dict[str, int]

    def accepts(self, grammar: str, text: str) -> bool:
        return accepts(self.tokens, grammar, text, self.named)


Vocabularies = Callable[[ModelConfig], Vocabulary]


@pytest.fixture(scope="module")
def vocabulary_of() -> Vocabularies:
    """Open each model's vocabulary once, because it is slow."""
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


def written(call_format: ForcedCalls, *calls: tuple[str, str]) -> str:
    each = (
        call_format.call_begin + name + call_format.name_end + arguments + call_format.call_end
        for name, arguments in calls
    )
    return call_format.begin + call_format.separator.join(each) + call_format.end


def body(choice: Any, **more: Any) -> ChatBody:
    sent = {"messages": [], "tools": TOOLS, "tool_choice": choice, **more}
    return msgspec.json.decode(json.dumps(sent), type=ChatBody)


@pytest.mark.parametrize("name", ["hermes", *FORCED])
def test_every_format_accepts_only_its_calls(
    name: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    call_format = forced_calls("", name)
    form = form_of_calls(body("required"), call_format)
    assert form is not None
    grammar, vocabulary = compiled(model, form), vocabulary_of(model)
    assert all(vocabulary.accepts(grammar, written(call_format, call)) for call in WHOLE)
    assert vocabulary.accepts(grammar, written(call_format, *WHOLE)) == (not call_format.is_single)
    assert not any(
        vocabulary.accepts(grammar, text)
        for text in ["", "It rains.", *(written(call_format, call) for call in WRONG)]
    )


def test_a_named_function_is_called_once(model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    call_format, vocabulary = forced_calls("", "hermes"), vocabulary_of(model)
    named = form_of_calls(body({"type": "function", "function": {"name": "now"}}), call_format)
    single = form_of_calls(body("required", parallel_tool_calls=False), call_format)
    assert named is not None and single is not None
    rain, now = (written(call_format, call) for call in WHOLE)
    assert vocabulary.accepts(compiled(model, named), now)
    assert not vocabulary.accepts(compiled(model, named), rain)
    assert vocabulary.accepts(compiled(model, single), rain)
    assert not vocabulary.accepts(compiled(model, single), written(call_format, *WHOLE))


def test_a_tool_with_an_any_of_schema_can_be_called(model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    other = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}
    parameters = {"properties": {"a": {"const": 1}}, "required": ["a"], "anyOf": [other]}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    call_format, vocabulary = forced_calls("", "hermes"), vocabulary_of(model)
    form = form_of_calls(body("required", tools=tools), call_format)
    assert form is not None
    grammar = compiled(model, form)
    assert vocabulary.accepts(grammar, written(call_format, ("now", '{"a": 1, "b": 2}')))
    assert not vocabulary.accepts(grammar, written(call_format, ("now", '{"a": 1}')))


ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
JSON = '{"answer": "yes"}'


def schema_or_calls(
    name: str, choice: str | None = "auto", **more: Any
) -> tuple[StructuredOutputsParams, ForcedCalls]:
    """Return the structured output of a request with a schema and tools, and the format of its calls."""
    call_format = forced_calls("openai_gptoss" if name == "openai" else "", name)
    form = StructuredOutputsParams(json=ANSWER, disable_additional_properties=True).checked()
    found = form_or_calls(form, body(choice, **more), ParsersConfig(tools=name, forced=call_format))
    assert found is not None
    return found, call_format


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", *FORCED])
def test_a_schema_with_tools_allows_calls(name: str, model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    form, call_format = schema_or_calls(name)
    grammar, vocabulary = compiled(model, form), vocabulary_of(model)
    assert vocabulary.accepts(grammar, JSON)
    assert all(vocabulary.accepts(grammar, written(call_format, call)) for call in WHOLE)
    assert vocabulary.accepts(grammar, written(call_format, *WHOLE)) == (not call_format.is_single)
    unknown = written(call_format, ("snow", "{}"))
    assert not any(
        vocabulary.accepts(grammar, text)
        for text in ["", "It rains.", '{"answer": 1}', unknown, JSON + written(call_format, WHOLE[0])]
    )


@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss"])
def test_calls_instead_of_a_schema_follow_reasoning(
    reasoning: str, model: ModelConfig, vocabulary_of: Vocabularies
) -> None:
    tools = "openai" if reasoning == "openai_gptoss" else "hermes"
    form, call_format = schema_or_calls(tools)
    marks = think_marks(reasoning)
    assert marks is not None
    reasoning_model = msgspec.structs.replace(model, parsers=ParsersConfig(reasoning=reasoning, thinks=marks))
    grammar = compiled(
        reasoning_model, form, OutputParsing(reasoning, call_format.reader), "user:" + marks.opens[0]
    )
    vocabulary, thought = vocabulary_of(model), "so" + marks.closes[0]
    assert vocabulary.accepts(grammar, thought + marks.answer + JSON)
    assert vocabulary.accepts(grammar, thought + written(call_format, WHOLE[0]))
    assert not vocabulary.accepts(grammar, thought + "It rains.")


def test_a_schema_with_many_tools_is_enforced(model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    many = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"not": {}}}} for i in range(200)
    ]
    form, call_format = schema_or_calls("hermes", tools=many)
    grammar = compiled(model, form)
    assert vocabulary_of(model).accepts(grammar, written(call_format, ("tool_199", '{"a": 1}')))


@pytest.mark.parametrize(
    ("form", "choice", "tools"),
    [
        (StructuredOutputsParams(json=ANSWER), "none", "hermes"),
        (StructuredOutputsParams(json=ANSWER), "auto", ""),
        (StructuredOutputsParams(regex="a"), "auto", "hermes"),
    ],
)
def test_a_form_is_unchanged_if_calls_are_impossible(
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
def test_a_form_applies_after_reasoning(kind: str, model: ModelConfig, vocabulary_of: Vocabularies) -> None:
    form, text = FORMS[kind]
    vocabulary = vocabulary_of(model)
    reasoning_model = msgspec.structs.replace(
        model, parsers=ParsersConfig(reasoning="qwen3", thinks=think_marks("qwen3"))
    )

    def is_accepted(answer: str, prompt: str) -> bool:
        return vocabulary.accepts(compiled(reasoning_model, form, OutputParsing("qwen3"), prompt), answer)

    assert is_accepted(text, "user:") and is_accepted(f"<think>so 13</think>\n\n{text}", "user:")
    assert not is_accepted(f"so 13</think>\n\n{text}", "user:") and not is_accepted(
        "<think>so</think>x", "user:"
    )
    assert is_accepted(f"so 13</think>\n{text}", "user:<think>\n") and not is_accepted(text, "user:<think>\n")
    assert is_accepted(text, "user:<think></think>\n")
    assert not is_accepted(f"<think>so</think>{text}", "user:<think></think>\n")
    assert not vocabulary.accepts(compiled(reasoning_model, form, None, "user:"), f"<think>so</think>{text}")


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize("reasoning", REASONING)
def test_every_reasoning_format_precedes_calls(
    reasoning: str,
    special: bool | None,
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
    vocabulary_of: Vocabularies,
) -> None:
    """Marks are text, special tokens or other added tokens."""
    marks, call_format = think_marks(reasoning), forced_calls(reasoning, "")
    assert marks is not None
    tokenizer = Tokenizer.from_str(tokenizers_by_style["byte_level"].to_str())
    if special is not None:
        names = re.findall(
            r"<\S+?>|\[\S+?\]", " ".join([*marks.opens, *marks.closes, marks.answer, call_format.call_begin])
        )
        tokenizer.add_tokens([AddedToken(name, special=special) for name in names])
    model = model_of(tokenizer, eos_token_ids=[1])
    form = form_of_calls(body("required"), call_format)
    assert form is not None
    reasoning_model = msgspec.structs.replace(
        model, parsers=ParsersConfig(reasoning=reasoning, thinks=marks, forced=call_format)
    )
    opening, closing = marks.opens[-1], marks.closes[-1]
    grammar = compiled(
        reasoning_model,
        form,
        OutputParsing(reasoning, call_format.reader, requires_calls=True),
        "user:" + opening,
    )
    call = written(call_format, WHOLE[0])
    assert vocabulary_of(model).accepts(grammar, f"so{closing}{call}")
    assert not vocabulary_of(model).accepts(grammar, f"so{closing}It rains.")
