"""Structured outputs in the tokenizer process: an enforceable grammar, or an error with a reason."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from quintet.process.grammars import open_matcher, open_vocabulary
from quintet.tokenizer_proc import main
from quintet.tokenizer_proc.nesting_depth import check_grammar
from quintet.tokenizer_proc.structural_tags import lark_of_text
from quintet.tokenizer_proc.structured import Forms
from quintet.wire import messages as m
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import RequestIds, Role
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.structured import MAX_FORM_CHARS, StructuredOutputsParams

STYLES = ("byte_level", "sentencepiece")


@pytest.fixture
def forms_of(
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> Callable[..., Forms]:
    def make(style: str = "byte_level", **more: Any) -> Forms:
        return Forms(model_of(tokenizers_by_style[style], eos_token_ids=[1], **more), is_mock=False)

    return make


def grammar_of(forms: Forms, **form: Any) -> str:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form)).checked()
    compiled = forms.compiled(params).structured_outputs
    assert compiled is not None and compiled.compiled and not compiled.kinds
    return compiled.compiled


def tokens_of(vocabulary: LLTokenizer, part: str, named: Mapping[str, int]) -> list[int]:
    return [named[part]] if part in named else vocabulary.greedy_tokenize(part)


def accepts(vocabulary: LLTokenizer, grammar: str, text: str, named: Mapping[str, int] | None = None) -> bool:
    """Return true if a text is a complete answer. Names of ``named`` in it are tokens."""
    matcher: LLMatcher = open_matcher(vocabulary, grammar)
    parts = re.split(f"({'|'.join(map(re.escape, named))})", text) if named else [text]
    tokens = [token for part in parts for token in tokens_of(vocabulary, part, named or {})]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TAG = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
CALLS = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "separator": "\n",
        "at_least_one": True,
        "tags": [
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": {"const": 1}},
                "end": "</call>",
            },
            {"type": "tag", "begin": "<say>", "content": {"type": "any_text"}, "end": "</say>"},
        ],
    },
}
FLAT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json": (
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        ['{"a": 1}', '{"a":-12,"b":null}', '{\n "a" : 0\n}'],
        ["{}", '{"a": "1"}', "1", '{"a": 1} '],
    ),
    "json as text": ({"json": '{"enum": ["x", 2]}'}, ['"x"', "2"], ["x"]),
    "json, anything": ({"json": True}, ["1", "[{}]"], ["x"]),
    "json, compact": ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    "json, closed": (
        {"json": {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}},
         "disable_additional_properties": True},
        ['{"a": {}}'],
        ['{"b": 1}', '{"a": {"b": 1}}'],
    ),
    "json, combined": (
        {"json": {"properties": {"a": {"const": 1}}, "anyOf": [{"properties": {"b": {"const": 2}}}]},
         "disable_additional_properties": True},
        ['{"a":1,"b":2}'],
        ['{"b":3}'],
    ),
    "json, closed, with names like keywords": (
        {"json": {"properties": {"properties": {"type": "integer"}, "a": {"const": {"properties": 1}}}},
         "disable_additional_properties": True},
        ['{"properties": 1, "a": {"properties": 1}}'],
        ['{"b": 1}'],
    ),
    "json, spaces of a flat object": (
        {"json": FLAT},
        ['{"a": 1}', '{"a":1}', '{\n  "a": 1\n}', '{\n' + 8 * " " + '"a" :\t1}', '{\r\n"a":\n1\n}'],
        ['{"a":  1}', '{\n\n"a": 1}', '{ \n"a": 1}', '{\n' + 9 * " " + '"a": 1}'],
    ),
    "json, spaces of a nested one": (
        {"json": {"type": "object", "properties": {"a": {"type": "array", "items": FLAT}}}},
        ['{\n    "a": [\n        {\n            "a": 1\n        }\n    ]\n}'],
        ['{\n' + 17 * " " + '"a": []}'],
    ),
    "json, spaces of any object": (
        {"json_object": True},
        ['{"a": {"b": {\n' + 20 * " " + '"c": 1}}}'],
        ['{"a": {"b": {\n' + 21 * " " + '"c": 1}}}'],
    ),
    "json, spaces between tags": (
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": FLAT}}},
        ['{\n' + 8 * " " + '"a": 1}'],
        ['{\n' + 9 * " " + '"a": 1}'],
    ),
    "json, spaces between tags, as requested": (
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": FLAT}}, "whitespace_pattern": "[ ]?"},
        ['{ "a": 1}'],
        ['{\n"a": 1}'],
    ),
    "json, spaces": ({"json": {"type": "array"}, "whitespace_pattern": "[ ]{0,2}"}, ["[1,  2]"], ["[1,   2]"]),
    "json_object": ({"json_object": True}, ["{}", '{"a": [1, {"b": "c"}]}'], ["[]", "1"]),
    "regex": ({"regex": r"^\d{3}-[a-c]+/\w$"}, ["123-abc/x"], ["12-a/x", "123-abc/", "١٢٣-a/x"]),
    "choice": ({"choice": ["yes", "n.o", 'a"b\n/é']}, ["yes", "n.o", 'a"b\n/é'], ["no", "yesn.o", "y"]),
    "lark": ({"grammar": 'start: "a" b*\nb: "b" | "c"'}, ["a", "abcb"], ["b"]),
    "gbnf": ({"grammar": 'root ::= "a" [0-9]+ ("x" | "y")?'}, ["a1", "a12y"], ["a", "axy"]),
    "tags": (
        {"structural_tag": TAG},
        ["hello", "so <f=a>12</f> then", "<f=a>1</f><f=a>2</f>"],
        ["<f=a>x</f>", "<f=b>1</f>", "<f="],
    ),
    "tags, spaces": (
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "array"}}}},
        ["[1, 2]", "[1,\n  2]"],
        ["[1,   2]", "[1,\n\n\n2]"],
    ),
    "tags, excluded text": (
        {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<f="], "excludes": ["<think>"], "tags": [
            {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": True}, "end": "</f>"}]}}},
        ["a < b", "so <f=a>12</f> then"],
        ["a <think>", "<f=a>1</f> <think>", "<think> <f=a>1</f>"],
    ),
    "a tag of text, excluded text and several ends": (
        {"structural_tag": {"format": {"type": "tag", "begin": "<a>", "end": ["</a>", "</b>"],
                                       "content": {"type": "any_text", "excludes": ["no/", "x\ny"]}}}},
        ["<a>yes</a>", "<a>x y</b>"],
        ["<a>no/</a>", "<a>x\ny</a>", "<a>yes</a>!", "<a>yes", "<a>yes</a> and</b>", "<a>yes</b> and</a>"],
    ),
    "a tag with several ends": (
        {"structural_tag": {"format": {"type": "tag", "begin": "<a>", "end": ["</a>", "."],
                                       "content": {"type": "json_schema", "style": "json", "json_schema": {"const": 1}}}}},
        ["<a>1</a>", "<a>1."],
        ["<a>1"],
    ),
    "repeated nodes": (
        {"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": kind, "content": {"type": "const_string", "value": sign}, **more} for kind, sign, more in (
                ("optional", "a", {}), ("star", "b", {}), ("plus", "c", {}),
                ("repeat", "d", {"min": 1, "max": 2}), ("repeat", "e", {"min": 2, "max": -1}))]}}},
        ["cdee", "abbccddeee"],
        ["aacdee", "bdee", "cee", "cdddee", "cde"],
    ),
    "calls": (
        {"structural_tag": CALLS},
        ["<call>1</call>", "<say>x</say>\n<call>1</call>"],
        ["", "x", "<call>2</call>", "<say>x"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("style", STYLES)
def test_a_form_accepts_only_its_texts(
    style: str, name: str, forms_of: Callable[..., Forms], model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:  # fmt: skip
    form, whole, wrong = FORMS[name]
    grammar = grammar_of(forms_of(style), **form)
    vocabulary = open_vocabulary(model_of(tokenizers_by_style[style], eos_token_ids=[1]))
    assert [text for text in whole if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in wrong if accepts(vocabulary, grammar, text)] == []


def test_special_tokens_in_structural_tags_are_tokens(
    forms_of: Callable[..., Forms],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_style["byte_level"]
    special = tokenizer.token_to_id("<|im_end|>")
    tag = {"type": "const_string", "value": "a<|im_end|>b"}
    grammar = grammar_of(forms_of(), structural_tag={"format": tag})
    matcher = open_matcher(open_vocabulary(model_of(tokenizer, eos_token_ids=[0])), grammar)
    letters = [tokenizer.token_to_id(letter) for letter in "ab"]
    assert matcher.try_consume_tokens([letters[0], special, letters[1]]) == 3
    assert matcher.is_accepting()


def chain(of: Callable[[int], object], length: int) -> dict[str, object]:
    return {"$defs": {f"a{i}": of(i + 1) for i in range(length)}, "$ref": "#/$defs/a0"}


def next_(i: int) -> dict[str, object]:
    return {"$ref": f"#/$defs/a{i}"} if i < 2000 else {"type": "integer"}


CIRCLE = {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}


DEEP: dict[str, dict[str, Any]] = {
    "references": {"json": chain(next_, 2000)},
    "anchors": {"json": chain(lambda i: {"$anchor": f"a{i - 1}", "$ref": f"#a{i % 2000}"}, 2000)},
    "own anchors": {
        "json": {"$id": "https://x/", **chain(lambda i: {"$id": f"a{i - 1}", "$ref": f"a{i % 2000}"}, 2000)}
    },
    "alternatives": {"json": chain(lambda i: {"anyOf": [next_(i)]}, 2000)},
    "values": {"json": chain(lambda i: {"items": {"items": {"items": next_(i)}}}, 2000)},
    "a circle": {"json": chain(lambda i: {"items": next_(i % 2000)}, 2000)},
    "in a tag": {"structural_tag": {"format": {"type": "json_schema", "json_schema": chain(next_, 2000)}}},
    "rules": {
        "grammar": "start: r0\n" + "".join(f'r{i}: "b" r{i + 1} | "c"\n' for i in range(5000)) + 'r5000: "a"'
    },
    "rules of many terms": {
        "grammar": "start: r-0\n" + "".join(f"r-{i}: r-{i + 1}\n" for i in range(5000)) + 'r-5000: "a"'
    },
    "GBNF": {
        "grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "a"'
    },
    "in a grammar": {"grammar": f"start: %json {msgspec.json.encode(chain(next_, 2000)).decode()}"},
}


@pytest.mark.parametrize("name", DEEP)
def test_too_deep_grammars_are_refused(name: str, forms_of: Callable[..., Forms]) -> None:
    """A stack overflow in the library would kill the process."""
    with pytest.raises(RequestError, match=r"levels deep|too many references"):
        grammar_of(forms_of(), **DEEP[name])


@pytest.mark.parametrize("part", ["\n", " ", "a ", "%json {", "/", '"', "a[", "[", "a:b\n", "\\", "{", "#"])
def test_checking_a_grammar_takes_linear_time(part: str) -> None:
    began_s = time.process_time()
    with contextlib.suppress(RequestError):
        check_grammar("start: a" + part * (MAX_FORM_CHARS // len(part)))
    assert (
        time.process_time() - began_s < 2.0
    )  # takes a tenth of this; a backtracking regular expression takes a minute


def test_recursive_grammars_are_not_too_deep(forms_of: Callable[..., Forms]) -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    lists = chain(lambda i: {"type": "array", "items": {"$ref": f"#/$defs/a{i % 60}"}}, 60)
    rules = "start: r0\n" + "".join(f'r{i}: "b" (r{i + 1} | r0)? | "c"\n' for i in range(200)) + 'r200: "a"'
    assert all(
        grammar_of(forms_of(), **form) for form in ({"json": tree}, {"json": lists}, {"grammar": rules})
    )


def test_a_text_with_many_tokens_takes_linear_time() -> None:
    named = {f"<|reserved_{i}|>": i for i in range(1000)}
    began_s = time.process_time()
    found = lark_of_text("<|reserved_1|>a<|reserved_12|>" * 4000, named)
    assert (
        time.process_time() - began_s < 1.0
    )  # one pass takes a hundredth of this; a pass for each name took minutes
    assert found.startswith('<[1]> "a" <[12]> <[1]>') and found.count("<[") == 8000


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"json": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, ["uniqueItems", "/properties/a/uniqueItems"]),
    ({"json": {"type": "object", "not": {"required": ["a"]}}}, ["not"]),
    ({"json": {"$ref": "#/$defs/nowhere"}}, ["nowhere"]),
    ({"json": {"$ref": "https://example.com/schema"}}, ["example.com"]),
    ({"json": {"type": "objct"}}, ["objct"]),
    ({"json": "false"}, ["is false"]),
    ({"json": {"x-guidance": {"lenient": True}, "not": {"minLength": 1}}}, ["not"]),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, ["x-guidance", "lenient"]),
    ({"regex": "(a"}, ["unclosed group"]),
    ({"regex": r"(a)\1"}, ["backreferences"]),
    ({"grammar": "start: missing"}, ["missing"]),
    ({"grammar": 'root ::= "a" b'}, ["'b'"]),
    ({"structural_tag": {"format": {"type": "poem"}}}, ["poem", "tags_with_separator"]),
    ({"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}}, ["'<a>'", "triggers"]),
    ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}}, ["items"]),
    ({"structural_tag": {"format": {"type": []}}}, ["[]", "must be one of"]),
    ({"structural_tag": {"format": {"type": "json_schema", "style": "qwen_xml"}}}, ["qwen_xml", "must be json"]),
    ({"structural_tag": {"format": {"type": "any_text", "excludes": [1]}}}, ["excludes"]),
    ({"structural_tag": {"format": {"type": "tag", "begin": "", "end": [1], "content": {"type": "any_text"}}}}, ["invalid end"]),
    ({"structural_tag": {"format": {"type": "repeat", "min": 2, "max": 1, "content": {"type": "any_text"}}}}, ["min or max"]),
    ({"grammar": "%llguidance {}"}, ["start"]),
    ({"grammar": "a | b"}, ["cannot be enforced"]),
    ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": [5], "tags": [{"begin": "5"}]}}}, ["invalid trigger"]),
    ({"json": {"type": "array", "contains": {}, "maxContains": [], "maxItems": 5}}, ["maxContains"]),
    ({"json": CIRCLE}, ["cannot be enforced"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "words"), REFUSED)
def test_unenforceable_forms_are_refused_by_name(
    form: dict[str, Any], words: list[str], forms_of: Callable[..., Forms]
) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(forms_of(), **form)
    assert caught.value.code is ErrorCode.INVALID and caught.value.param
    assert [word for word in words if word not in caught.value.message] == [], caught.value.message


def test_models_without_structured_output_have_an_error(
    forms_of: Callable[..., Forms], model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> None:  # fmt: skip
    endless = Forms(model_of(tokenizers_by_style["byte_level"], eos_token_ids=[]), is_mock=False)
    with pytest.raises(RequestError, match="no eos_token_id"):
        grammar_of(endless, regex="a")
    for style in set(tokenizers_by_style) - set(STYLES):
        with pytest.raises(RequestError, match="cannot read"):
            grammar_of(forms_of(style), regex="a")
    with pytest.raises(RequestError, match="mock"):
        grammar_of(Forms(model_of(tokenizers_by_style["byte_level"]), is_mock=True), regex="a")


def test_a_form_does_not_delay_other_requests_and_is_checked_once(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    harness = make_harness(model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1]), Role.TOKENIZER)
    harness.start(main.run, main.prepare)
    ids = RequestIds(0, 1)

    def submit(**form: Any) -> int:
        outputs_params = StructuredOutputsParams(**form) if form else None
        params = SamplingParams(structured_outputs=outputs_params).checked()
        request_id = ids.take()
        harness.send(m.Submit(request_id, m.TextPrompt("Hello"), RequestSpec(params, 1, 0), 2, 0))
        return request_id

    form = {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(400)}}}
    slow, plain, refused = submit(**form), submit(), submit(regex="(")
    assert harness.wait(harness.core, m.Admit).request_id == plain
    admit = harness.wait(harness.core, m.Admit)
    assert admit.request_id == slow
    assert "p399" in admit.spec.params.structured_outputs.compiled
    failed = harness.wait(harness.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (refused, ErrorCode.INVALID)
    again, plain = submit(**form), submit()
    assert [harness.wait(harness.core, m.Admit).request_id for _ in range(2)] == [again, plain]
