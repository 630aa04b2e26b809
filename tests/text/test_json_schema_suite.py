"""JSON Schema's own test suite: an accepted schema is enforced completely, or else refused by name.

`json_schema_test_suite` holds its required tests of draft 2020-12 at 44401e0c046704b476ec9d2e2fccdaee618f259d
(github.com/json-schema-org/JSON-Schema-Test-Suite), under the licence in the same folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from quintet.process.grammars import open_matcher, open_vocabulary
from quintet.tokenizer_proc.structured import Forms
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import SamplingParams
from quintet.wire.structured import StructuredOutputsParams

SUITE = Path(__file__).parent / "json_schema_test_suite"
MAX_ORDERS = 24
"""Most orders tried of an object's keys, because grammars fix the schema's order."""

NUM_ACCEPTED = 238
STRICTER = {
    # Integers have no fraction.
    "const": {"float zero is valid", "float one is valid", "float -2.0 is valid", "float is valid"},
    "enum": {"float zero is valid", "[0.0] is valid", "float one is valid", "[1.0] is valid"},
    "type": {"a float with zero fractional part is an integer"},
    # Custom dialects are not fetched: the draft's keywords apply.
    "vocabulary": {"no validation: invalid number, but it still validates"},
    # Formats are enforced; in the draft they are annotations.
    "format": {
        f"invalid {name} string is only an annotation by default"
        for name in (
            "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
        )
    },
}  # fmt: skip
"""Valid instances that the grammar rejects, by file."""


def written(value: object) -> Iterator[str]:
    """Yield JSON texts of a value, with the keys of objects in any order."""
    if isinstance(value, dict):
        for order in itertools.islice(itertools.permutations(value.items()), MAX_ORDERS):
            for inner in itertools.islice(
                itertools.product(*(list(written(each)) for _, each in order)), MAX_ORDERS
            ):
                pairs = zip(order, inner, strict=True)
                yield (
                    "{"
                    + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{text}" for (key, _), text in pairs)
                    + "}"
                )
    elif isinstance(value, list):
        for inner in itertools.islice(
            itertools.product(*(list(written(each)) for each in value)), MAX_ORDERS
        ):
            yield "[" + ",".join(inner) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def is_answer(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    tokens = vocabulary.greedy_tokenize(text)
    matcher = open_matcher(vocabulary, grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(forms: Forms, schema: object) -> str | None:
    """Return the schema's grammar, or None if the schema is refused with a reason."""
    form = StructuredOutputsParams(json=json.dumps(schema))
    try:
        compiled = forms.compiled(SamplingParams(structured_outputs=form).checked()).structured_outputs
    except RequestError as error:
        assert error.code is ErrorCode.INVALID and "cannot be enforced: " in error.message
        return None
    assert compiled is not None
    return compiled.compiled


@pytest.mark.whole
def test_accepted_schemas_are_enforced(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    model = model_of(tokenizers_by_style["byte_level"], eos_token_ids=[1])
    forms, vocabulary = Forms(model, is_mock=False), open_vocabulary(model)
    num_accepted, wrong, stricter = 0, [], dict[str, set[str]]()
    for path in sorted(SUITE.glob("*.json")):
        groups: list[dict[str, Any]] = json.loads(path.read_text())
        for group in groups:
            grammar = grammar_of(forms, group["schema"])
            if grammar is None:
                continue
            num_accepted += 1
            for case in group["tests"]:
                is_accepted = any(is_answer(vocabulary, grammar, text) for text in written(case["data"]))
                if is_accepted and not case["valid"]:
                    wrong.append((path.stem, group["description"], case["description"]))
                if case["valid"] and not is_accepted:
                    stricter.setdefault(path.stem, set()).add(case["description"])
    assert wrong == []
    assert stricter == STRICTER
    assert num_accepted == NUM_ACCEPTED
