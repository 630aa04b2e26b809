"""Schemas of client libraries: keywords without effect are removed, the rest is enforced or refused by name."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.text.test_structured import accepts, grammar_of
from tokenizers import Tokenizer

from quintet.process.grammars import open_vocabulary
from quintet.tokenizer_proc.notations.schema_keywords import ANNOTATIONS, APPLICATORS, WITHOUT_LOOKAROUND
from quintet.tokenizer_proc.notations.schemas import INNER, NAMED_INNER, plain_schema
from quintet.tokenizer_proc.structured import Forms
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
UNCONSTRAINED: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": STRING},
    {"type": "object", "propertyNames": {"type": ["string", "null"], "description": "a name"}},
    {"type": "object", "propertyNames": {}},
    {"type": "object", "propertyNames": {"format": "slug"}},
    {"type": "string", "format": "password"},
    {"type": ["string", "null"], "format": "json-pointer"},
    {"format": "int32"},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "items": STRING, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "contains": INTEGER, "minContains": 0},
    {"type": "array", "minContains": 2},
    {"type": "array", "contains": {}},
    {"type": "object", "if": {"properties": {"a": {"const": 1}}}},
    {"type": "object", "then": {"required": ["a"]}, "else": False},
    {"type": "object", "if": {"minProperties": 1}, "then": {"title": "T"}},
    {"type": "object", "dependentRequired": {}},
    {"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}, "dependencies": {}},
    {"type": "object", "unevaluatedProperties": True},
    {"type": "array", "unevaluatedItems": {}},
    {"type": "object", "not": False},
    {"type": "object", "$dynamicAnchor": "node", "$recursiveAnchor": True},
    {"type": "object", "$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
    {"type": "object", "required": None, "properties": None, "enum": None, "additionalProperties": None},
    {"type": "object", "nullable": False, "x-order": 1, "xml": {}, "discriminator": {"propertyName": "a"}},
    {"type": ["string", "null"], "not": {"type": "integer"}},
    *(
        {"type": "object", "$schema": f"{uri}"}
        for uri in (
            "http://json-schema.org/schema#",
            "https://json-schema.org/draft-07/schema#",
            "http://json-schema.org/draft-07/schema",
            "http://json-schema.org/draft/2020-12/schema",
            "https://json-schema.org/draft/2019-09/schema#",
            "http://example.com/",
        )
    ),
    {"$id": "A person", "type": "object"},
    {"type": "object", "properties": [], "required": {}, "$defs": []},
    {"type": "object", "properties": {"a": {"type": "object", "required": True}}, "required": False},
    {"type": "any"},
    {"type": ""},
]
"""Schemas with keywords that constrain nothing."""

CAT = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}, "n": INTEGER}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "n": INTEGER}}


def bird(color: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": "bird"}, "color": {"const": color, "default": color}},
    }


PET = {
    "$defs": {"Cat": CAT, "Dog": DOG},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
}
SET = {"type": "array", "items": {"enum": ["a", "b"], "type": "string"}, "uniqueItems": True}
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
ENFORCED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "names of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"b": 1}, {"a": 1, "c": 2}, {"a": "1"}],
    ),
    "names of an enum, with properties": (
        {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": STRING, "c": {}}, "additionalProperties": INTEGER,
         "type": "object"},
        [{"a": "1", "b": 2}],
        [{"a": 1}, {"c": 1}],
    ),
    "names of a union of values": (
        {"type": "object", "propertyNames": {"anyOf": [{"const": "a", "type": "string"}, {"enum": ["b"]}]}},
        [{}, {"a": 1, "b": None}],
        [{"c": 1}],
    ),
    "zod's local time": (
        {"type": "string", "format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"},
        ["10:20", "23:59:59.5"],
        ["24:00", "10:20:00Z"],
    ),
    "a date-time without a zone": (
        {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d$"},
        ["2026-11-29T10:20"],
        ["2026-11-29T10:20Z"],
    ),
    "Python's names of types": (
        {"type": "object", "properties": {"a": {"type": "str"}, "b": {"type": ["Int", "null"]}, "c": {"type": "list"}}},
        [{"a": "x", "b": 1, "c": []}, {"b": None}],
        [{"a": 1}, {"b": "x"}, {"c": {}}],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-c]$"}, "additionalProperties": INTEGER},
        [{}, {"a": 1, "b": 2}],
        [{"d": 1}, {"a": "1"}],
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
        [{"a": 1}, {"ab": None}],
        [{"": 1}, {"abc": 1}],
    ),
    "a set": (SET, [[], ["a"], ["b", "a"], ["a", "b"]], [["a", "a"], ["c"], ["a", "b", "a"]]),
    "a set of some length": ({**SET, "minItems": 1, "maxItems": 5}, [["a"], ["b", "a"]], [[], ["b", "b"]]),
    "a set of seven": (
        {"type": "array", "items": {"enum": list("abcdefg")}, "uniqueItems": True},
        [list("abcdefg"), ["b", "g"]],
        [["a", "a"], ["b", "a"]],
    ),
    "a set by reference": (
        {"$defs": {"E": {"enum": [1, 2], "title": "E"}}, "type": "array", "items": {"$ref": "#/$defs/E"}, "uniqueItems": True},
        [[2, 1]],
        [[1, 1], [3]],
    ),
    "a set of booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [[True, False]],
        [[True, True]],
    ),
    "a nullable type": ({"type": "STRING", "nullable": True, "minLength": 1}, ["a", None], ["", 1]),
    "a type that is not nullable": ({"type": "string", "nullable": False}, ["a"], [None]),
    "a nullable enumeration": (
        {"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"],
    ),
    "a nullable constant": ({"const": "a", "nullable": True}, ["a", None], ["b"]),
    "a nullable property": (
        {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}, "required": ["a"]},
        [{"a": 1}, {"a": None}],
        [{}, {"a": "1"}],
    ),
    "a nullable reference": (
        {"$defs": {"N": INTEGER}, "$ref": "#/$defs/N", "nullable": True}, [1, None], ["1"],
    ),
    "a nullable union": ({"anyOf": [INTEGER, {"type": "boolean"}], "nullable": True}, [1, True, None], ["1"]),
    "a tagged union": (PET, [{"kind": "cat"}, {"kind": "dog", "n": 1}], [{"n": 1}, {"kind": "cow"}]),
    "oneOf by constants": ({"oneOf": [{"const": 1}, {"const": "1"}]}, [1, "1"], [2]),
    "oneOf by types": ({"oneOf": [{"type": "integer"}, {"type": ["null", "string"]}]}, [1, None], [True]),
    "oneOf by a required property": (
        {"oneOf": [{**CAT, "required": ["kind"]}, {**DOG, "required": ["kind"]}]},
        [{"kind": "dog"}],
        [{}],
    ),
    "unevaluated properties": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "unevaluated items": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": STRING}, [[1], [1, "a"]], [[1, 1]],
    ),
    "any element": ({"type": "array", "contains": True, "minContains": 2, "maxContains": 3}, [[1, 2]], [[1], [1, 2, 3, 4]]),
    "other types": ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    "a decimal of Pydantic's": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        [1, 1.5],
        ["+"],
    ),
    "types in upper case": (
        {"type": "OBJECT", "properties": {"a": {"type": ["STRING", "NULL"]}}, "required": ["a"]},
        [{"a": "x"}, {"a": None}],
        [{"a": 1}, {}],
    ),
    "int64": (
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}, [0, -(1 << 62), 1 << 62], [1.5, "1"],
    ),
    "a double": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0.5, -7], ["1"],
    ),
    "whole counts": ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
    "a reference with brackets": (
        {"$defs": {"List[int]": INTEGER, "a b": STRING}, "type": "object",
         "properties": {"x": {"$ref": "#/$defs/List[int]"}, "y": {"$ref": "#/$defs/a b"}}},
        [{"x": 1, "y": "a"}],
        [{"x": "a"}, {"y": 1}],
    ),
    "an e-mail address of zod's": (
        {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        ["a@b.co", "a.b+c@d-e.org", "a'b@c.de"],
        [".a@b.co", "a..b@c.de", "a.@b.co", "a@b", "a'@b.co"],
    ),
    "a duration of zod's": (
        {"type": "string", "format": "duration", "pattern": ZOD_DURATION},
        ["P1W", "P1Y2M", "PT5S", "P1DT2H"],
        ["P", "PT", "P1WT1H", "P1DT"],
    ),
    "names of an enum by reference": (
        {"$defs": {"E": {"enum": ["a", "b"], "title": "E", "type": "string"}}, "type": "object",
         "propertyNames": {"$ref": "#/$defs/E"}, "additionalProperties": INTEGER},
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "1"}],
    ),
    "names of a format": (
        {"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": INTEGER},
        [{"123e4567-e89b-12d3-a456-426614174000": 1}],
        [{"a": 1}],
    ),
    "names of days": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": INTEGER},
        [{"2026-11-29": 1}],
        [{"2026-13-29": 1}, {"a": 1}],
    ),
    "names of times": (
        {"type": "object", "propertyNames": {"format": "date-time"}},
        [{"2026-11-29T10:20:30.5+01:00": 1, "2026-11-29T10:20:30Z": 1}],
        [{"2026-11-29": 1}],
    ),
    "definitions of an inner schema (MCP)": (
        {"type": "object", "properties": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/N"}, "$defs": {"N": INTEGER}},
            "b": {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/S", "definitions": {"S": STRING}},
        }},
        [{"a": [1], "b": "x"}],
        [{"a": ["x"]}, {"b": 1}],
    ),
    "schemas of OpenAPI": (
        {"components": {"schemas": {"P": {"type": "object", "properties": {"a": {"type": "STRING", "nullable": True}}}}},
         "type": "object", "properties": {"p": {"$ref": "#/components/schemas/P"}}},
        [{"p": {"a": None}}, {"p": {"a": "x"}}],
        [{"p": {"a": 1}}],
    ),
    "a decimal as text": (
        {"type": "string", "pattern": PYDANTIC_DECIMAL}, ["1.5", "-.5", "+007."], ["+", ".", "1e5", ""],
    ),
    "counts as text": ({"type": "array", "minItems": "1", "maxItems": "2"}, [[1]], [[], [1, 2, 3]]),
    "one schema of allOf": (
        {"$defs": {"N": INTEGER}, "type": "object",
         "properties": {"a": {"allOf": [{"$ref": "#/$defs/N"}], "description": "d", "nullable": True}}},
        [{"a": 1}, {"a": None}],
        [{"a": "1"}],
    ),
    "a reference to the schema of allOf (zod)": (
        {"type": "object", "properties": {"a": {"allOf": [INTEGER]}, "b": {"$ref": "#/properties/a/allOf/0"}}},
        [{"a": 1, "b": 2}],
        [{"a": "1"}, {"b": "1"}],
    ),
    "one of several properties": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "required": ["c"],
         "oneOf": [{"required": ["a"]}, {"required": ["b"], "title": "b"}]},
        [{"a": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}],
        [{"c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1}],
    ),
    "a nested tagged union": (
        {"$defs": {"Cat": CAT, "Dog": DOG, "Robin": bird("red"), "Owl": bird("brown")},
         "discriminator": {"propertyName": "kind"},
         "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"},
                   {"oneOf": [{"$ref": "#/$defs/Robin"}, {"$ref": "#/$defs/Owl"}], "discriminator": {"propertyName": "color"}}]},
        [{"kind": "cat"}, {"kind": "bird", "color": "red"}],
        [{"kind": "bird"}, {"color": "red"}, {"kind": "bird", "color": "blue"}],
    ),
    "an enum of an external kind (serde)": (
        {"oneOf": [{"type": "string", "enum": ["Unit"]},
                   {"type": "object", "properties": {"A": INTEGER}, "required": ["A"], "additionalProperties": False},
                   {"type": "object", "properties": {"B": INTEGER}, "required": ["B"], "additionalProperties": False}]},
        ["Unit", {"A": 1}, {"B": 1}],
        [{}, {"A": 1, "B": 1}, "A"],
    ),
    "an identifier with a blank": (
        {"$id": "A person", "$defs": {"N": INTEGER}, "type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}},
        [{"a": 1}],
        [{"a": "1"}],
    ),
    "paths as identifiers (jsonschema.net)": (
        {"$id": "http://example.com/a.json", "type": "object",
         "properties": {"b": {"$id": "#root/b", "type": "object", "properties": {"c": {"$id": "#root/b/c", "type": "integer"}}}}},
        [{"b": {"c": 1}}],
        [{"b": {"c": "1"}}],
    ),
    "a pattern of a declared name": (
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}, "b": STRING}, "required": ["a"],
         "patternProperties": {"^a$": INTEGER, "^b$": {"minLength": 2}}, "additionalProperties": False},
        [{"a": 5}, {"a": 5, "b": "xx"}],
        [{"a": 4}, {"a": 5, "b": "x"}, {"a": 5, "c": 1}],
    ),
    "never": (
        {"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": {"not": {}}},
        [{}],
        [{"a": 1}, {"b": 1}],
    ),
}  # fmt: skip
"""Schemas, accepted JSON, and rejected JSON."""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {"enum": ["a", 1], "type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ({**SET, "prefixItems": [{"const": "a"}]}, "uniqueItems"),
    ({"type": "object", "propertyNames": {"format": "email"}}, "propertyNames"),
    ({"type": "object", "propertyNames": False}, "propertyNames"),
    ({"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "propertyNames"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"if": {"type": "object"}, "then": {"required": ["a"]}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "number", "not": {"type": "integer"}}, "not"),
    ({"not": {"required": ["a"]}}, "not"),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$dynamicAnchor": "a", "items": {"$dynamicRef": "#a"}}, "$dynamic"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [CAT, DOG]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    ({"type": "string", "pattern": "^(?!a)b"}, "/pattern"),
    ({"items": {"$ref": "#/$defs/N", "$defs": {"N": INTEGER}}, "properties": {"b": {"$defs": {"N": STRING}}}}, "/$defs/N"),
]  # fmt: skip


@pytest.fixture
def forms(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> tuple[Forms, Callable[[str, Any], bool]]:
    model = model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1])
    vocabulary = open_vocabulary(model)
    return Forms(model, is_mock=False), lambda grammar, value: accepts(vocabulary, grammar, json.dumps(value))


@pytest.mark.parametrize("schema", UNCONSTRAINED, ids=str)
def test_keywords_without_effect_are_accepted(schema: dict[str, Any], forms: tuple[Forms, Any]) -> None:
    grammar_of(forms[0], json={"type": "object", "properties": {"v": schema}})
    grammar_of(forms[0], structural_tag={"format": {"type": "json_schema", "json_schema": schema}})


@pytest.mark.parametrize(("pattern", "equivalent"), WITHOUT_LOOKAROUND.items())
def test_replaced_patterns_are_equivalent(pattern: str, equivalent: str) -> None:
    texts = {"".join(signs) for n in range(6) for signs in itertools.product("P1YT", repeat=n)}
    texts |= {
        f"{local}@b.co"
        for n in range(5)
        for signs in itertools.product("a.'+", repeat=n)
        if (local := "".join(signs))
    }
    texts |= {"".join(signs) for n in range(6) for signs in itertools.product("+-.01", repeat=n)}
    texts |= {"a@b..co", "a@-b.co", "P1Y1M1DT1H1M1,5S", "PT1M", "PT1M1S", "P1D1M", "P1W1D", "P1M1DT1S"}
    for text in texts:
        assert bool(re.search(pattern, text)) == bool(re.search(equivalent, text)), text


def test_a_required_property_without_schema_takes_any_value(
    forms: tuple[Forms, Callable[[str, Any], bool]],
) -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]}
    grammar = grammar_of(forms[0], json=schema, disable_additional_properties=True)
    assert forms[1](grammar, {"a": 1, "b": [None]})
    assert not forms[1](grammar, {"a": 1})
    assert not forms[1](grammar, {"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize(
    ("schema", "answer", "other"),
    [
        ({"properties": {"a": INTEGER}}, {"a": 1}, "a"),
        ({"type": "object", "properties": {"b": {"properties": {"a": INTEGER}}}}, {"b": {"a": 1}}, {"b": "a"}),
        (
            {"type": "object", "properties": {"b": {"allOf": [{"$ref": "#/$defs/A"}], "default": {}}},
             "$defs": {"A": {"type": "object", "properties": {"a": INTEGER}}}},
            {"b": {"a": 1}},
            {"b": {"c": 1}},
        ),
        (
            {"type": "object", "properties": {"b": {"allOf": [{"$ref": "#/$defs/A"}, {"description": "d"}]}},
             "$defs": {"A": {"type": "object", "properties": {"a": INTEGER}}}},
            {"b": {"a": 1}},
            {"b": {"c": 1}},
        ),
    ],
)  # fmt: skip
def test_closed_schemas_with_properties_allow_only_their_objects(
    schema: dict[str, Any], answer: Any, other: Any, forms: tuple[Forms, Callable[[str, Any], bool]]
) -> None:
    grammar = grammar_of(forms[0], json=schema, disable_additional_properties=True)
    assert forms[1](grammar, answer)
    assert not forms[1](grammar, other)


@pytest.mark.parametrize("name", ENFORCED)
def test_keywords_unknown_to_the_library_are_rewritten_and_enforced(
    name: str, forms: tuple[Forms, Callable[[str, Any], bool]]
) -> None:
    schema, allowed, wrong = ENFORCED[name]
    made, is_answer = forms
    grammar = grammar_of(made, json=schema)
    assert [value for value in allowed if not is_answer(grammar, value)] == []
    assert [value for value in wrong if is_answer(grammar, value)] == []


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=str)
def test_unenforceable_keywords_are_refused_by_name(
    schema: dict[str, Any], word: str, forms: tuple[Forms, Any]
) -> None:
    tag = {"format": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"v": schema}}}}
    for form in ({"json": {"type": "object", "properties": {"v": schema}}}, {"structural_tag": tag}):
        with pytest.raises(RequestError) as caught:
            grammar_of(forms[0], **form)
        assert word in caught.value.message
        assert "rule_0" not in caught.value.message


def test_the_error_names_the_path_in_a_structural_tag(forms: tuple[Forms, Any]) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(RequestError, match=r"at .*/properties/tags/uniqueItems"):
        grammar_of(forms[0], structural_tag=tag)


def test_property_names_and_values_like_keywords_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"const": None}, "format": {"enum": [{"not": {}, "if": None}]}},
        "default": {"propertyNames": None},
    }
    assert plain_schema(schema) == schema


def test_schemas_that_would_grow_without_bound_are_refused(forms: tuple[Forms, Any]) -> None:
    many = {
        "type": "object",
        "properties": {f"p{i}": {**SET, "items": {"enum": [1, 2, 3, 4]}} for i in range(40)},
    }
    with pytest.raises(RequestError, match="uniqueItems"):
        grammar_of(forms[0], json=many)


def test_the_analysis_of_unions_is_bounded() -> None:
    """Each level has two references to the next: 2^40 paths."""
    levels = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    deep = {
        "oneOf": [{"$ref": "#/$defs/a0"}, {"type": "integer"}],
        "$defs": {**levels, "a40": {"const": "x"}},
    }
    wide = {
        "oneOf": [{"$ref": "#/$defs/a"}] * 64,
        "items": [{"oneOf": [{"$ref": "#/$defs/a"}] * 64}] * 64,
        "$defs": {"a": {"enum": list(range(1000))}},
    }
    sets = {**SET, "items": {"$ref": "#/$defs/a"}, "minItems": 1000}
    large = {"prefixItems": [sets] * 500, "$defs": {"a": {"enum": list(range(1000))}}}
    for schema in (deep, wide, large):
        began_s = time.process_time()
        assert plain_schema(schema) == schema
        assert time.process_time() - began_s < 2.0  # takes a tenth of this


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(0, 2)
    | st.sampled_from(["", "a", "string", "^a$", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "type", "$ref"]), inner, max_size=2)
    ),
    max_leaves=4,
)
SCHEMAS = st.recursive(
    st.dictionaries(
        st.sampled_from(sorted(INNER | NAMED_INNER | APPLICATORS | ANNOTATIONS))
        | st.sampled_from(
            [
                "type",
                "enum",
                "const",
                "required",
                "pattern",
                "format",
                "minItems",
                "maxItems",
                "uniqueItems",
                "minLength",
                "maxLength",
                "minContains",
                "maxContains",
                "discriminator",
                "dependentRequired",
                "$schema",
            ]
        ),
        JSON_VALUES,
        max_size=4,
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(sorted(INNER)), inner | st.lists(inner, max_size=3), max_size=3
    ),
    max_leaves=6,
)


@given(SCHEMAS)
@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_invalid_schemas_are_left_to_the_library(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    plain_schema(schema)
    assert json.dumps(schema) == before
