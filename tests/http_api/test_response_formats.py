"""Structured-output fields of other servers are enforced or refused; none is ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quintet.frontend.api.responses.parse import chat_body, echo_of, items_of
from quintet.frontend.api.responses.types import ResponsesBody
from quintet.wire.messages import Submit
from quintet.wire.params import SamplingParams
from quintet.wire.structured import StructuredOutputsParams

C, H, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
CLOSED = StructuredOutputsParams(json=AS_TEXT, disable_additional_properties=True)
ANY_OBJECT = StructuredOutputsParams(json_object=True)
REGEX, GBNF = StructuredOutputsParams(regex="a+"), StructuredOutputsParams(grammar='root ::= "a"')
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TAG_TEXT = json.dumps(TAG, separators=(",", ":"))
OPEN_SCHEMA = {"additionalProperties": {"type": "string"}}
OPEN = StructuredOutputsParams(
    json=json.dumps(OPEN_SCHEMA, separators=(",", ":")), disable_additional_properties=True
)
BODIES: dict[str, dict[str, Any]] = {
    C: {"prompt": "x"},
    H: {"messages": [{"role": "user", "content": "x"}]},
    R: {"input": "x"},
    M: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}
FORMATS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"type": "text"}, None),
    ({"type": "text", "json_schema": None}, None),
    ({"type": "json_object"}, ANY_OBJECT),
    ({"type": "json_object", "schema": SCHEMA}, CLOSED),
    ({"type": "json_object", "schema": {}}, ANY_OBJECT),
    ({"type": "json_object", "json_schema": {"name": "x", "schema": SCHEMA}}, CLOSED),
    ({"type": "json", "value": SCHEMA}, CLOSED),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, CLOSED),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": "true"}}, CLOSED),
    ({"type": "json_schema", "json_schema": SCHEMA}, CLOSED),
    ({"type": "json_object", "schema": OPEN_SCHEMA}, OPEN),
    ({"type": "json_schema", "schema": SCHEMA}, CLOSED),
    ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, CLOSED),
    ({"type": "regex", "value": "a+"}, REGEX),
    ({"type": "regex", "pattern": "a+"}, REGEX),
    ({"type": "grammar", "grammar": 'root ::= "a"'}, GBNF),
]
TOP_LEVEL: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"grammar": 'root ::= "a"'}, GBNF),
    ({"grammar": ""}, None),
    ({"grammar": None, "json_schema": None, "grammar_lazy": False}, None),
    ({"grammar": {"type": "json", "value": SCHEMA}}, CLOSED),
    ({"grammar": {"type": "regex", "value": "a+"}}, REGEX),
    ({"json_schema": SCHEMA}, CLOSED),
    ({"json_schema": AS_TEXT}, CLOSED),
    ({"json_schema": {"name": "x", "schema": SCHEMA}}, CLOSED),
    ({"regex": "a+"}, REGEX),
    ({"regex_pattern": "a+"}, REGEX),
    ({"ebnf": 'root ::= "a"'}, GBNF),
    ({"grammar_string": 'root ::= "a"'}, GBNF),
    ({"guided_json": SCHEMA}, StructuredOutputsParams(json=AS_TEXT)),
    ({"guided_grammar": "", "grammar_string": "", "regex_pattern": "", "json_schema": ""}, None),
    ({"nvext": {"guided_json": SCHEMA}}, StructuredOutputsParams(json=AS_TEXT)),
    ({"extra_body": {"guided_regex": "a+", "top_k": 5}}, REGEX),
    ({"extra_body": {"google": {}}, "nvext": None}, None),
    ({"structural_tag": TAG}, StructuredOutputsParams(structural_tag=TAG_TEXT)),
    ({"structural_tag": TAG_TEXT}, StructuredOutputsParams(structural_tag=TAG_TEXT)),
]


def form_sent(server: Any, path: str, body: dict[str, Any]) -> StructuredOutputsParams | None:
    """Return the structured output with which a request is submitted."""
    answer = server.ask("POST", path, {**BODIES[path], **body})
    assert answer.status == 200, answer.body
    submits = [message for _, _, message in server.engine.sent if isinstance(message, Submit)]
    form = submits[-1].spec.params.structured_outputs
    assert form is None or isinstance(form, StructuredOutputsParams)
    return form


@pytest.mark.parametrize(("fields", "form"), FORMATS, ids=str)
def test_response_format_accepts_the_forms_of_other_servers(
    shared: Any, fields: dict[str, Any], form: StructuredOutputsParams | None
) -> None:
    for path in (C, H):
        assert form_sent(shared, path, {"response_format": fields}) == form


@pytest.mark.parametrize(("fields", "form"), TOP_LEVEL, ids=str)
def test_top_level_fields_are_enforced_in_every_dialect(
    shared: Any, fields: dict[str, Any], form: StructuredOutputsParams | None
) -> None:
    for path in (C, H, R, M):
        assert form_sent(shared, path, fields) == form


def test_the_format_of_the_responses_api_may_be_an_object_with_a_schema(shared: Any) -> None:
    text = {"format": {"type": "json_object", "schema": SCHEMA}}
    assert form_sent(shared, R, {"text": text}) == CLOSED


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (H, {"response_format": {"type": "text", "schema": SCHEMA}}, "allowed with it: nothing"),
        (H, {"response_format": {"type": "json_object", "grammar": "a"}}, "response_format has grammar"),
        (H, {"response_format": {"type": "json_schema", "schema": SCHEMA, "value": SCHEMA}}, "schema and value"),
        (H, {"response_format": {"type": "regex"}}, "response_format.regex is missing"),
        (H, {"response_format": {"type": "json_schema", "schema": "{"}}, "not valid JSON"),
        (H, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}}, "required field schema"),
        (H, {"response_format": {"type": "xml"}}, "must be one of text, json_object"),
        (H, {"grammar": {"type": "poem", "value": 1}}, "grammar.type is 'poem'"),
        (H, {"grammar": 5}, "grammar is invalid"),
        (H, {"grammar": "a", "json_schema": SCHEMA}, "json_schema and grammar were sent"),
        (H, {"grammar": "a", "extra_body": {"guided_json": SCHEMA}}, "grammar and extra_body.guided_json were sent"),
        (H, {"grammar": 'root ::= "a"', "grammar_lazy": True}, "grammar_lazy is true"),
        (C, {"json_schema": [1]}, "json_schema is invalid"),
        (H, {"regex": "a", "use_beam_search": True}, "regex has no effect with use_beam_search"),
        (C, {"structured_outputs": {"structural_tag": "true"}}, "structural_tag that is not a JSON object"),
        (C, {"structured_outputs": {"json_object": True, "calls": "true"}}, "calls that is not a JSON object"),
        (C, {"structured_outputs": {"regex": "a", "calls": "{}"}}, "calls with regex"),
        (R, {"response_format": {"type": "json_object"}}, "send text.format"),
        (M, {"response_format": {"type": "json_object"}}, "send output_config.format"),
    ],
)  # fmt: skip
def test_invalid_structured_outputs_are_refused(
    shared: Any, path: str, fields: dict[str, Any], words: str
) -> None:
    refused = shared.ask("POST", path, {**BODIES[path], **fields})
    assert refused.status == 400 and words in refused.json["error"]["message"], refused.body


def test_a_format_nested_as_in_chat_completions_is_the_flat_one_of_responses() -> None:
    named = {"name": "n", "schema": SCHEMA, "strict": True}
    forms, echoes = [], []
    for fields in (named, {"json_schema": named}):
        sent = {"input": "x", "text": {"format": {"type": "json_schema", **fields}}}
        body = msgspec.json.decode(json.dumps(sent), type=ResponsesBody)
        forms.append(chat_body(body, items_of(body))[0].response_format)
        echoes.append(json.loads(msgspec.json.encode(echo_of(body, SamplingParams())["text"])))
    assert forms[0] is not None and forms[0] == forms[1]
    assert echoes[0] == echoes[1]
