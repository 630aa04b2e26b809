"""Validation of structured outputs, and compilation to grammars of the library that enforces them.

Unsupported parts are rejected by name, never ignored. `quintet.process.grammars` bounds the work of a grammar. All
functions may run in a lane's thread.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from quintet.process.grammars import bounds, named_tokens, open_matcher, open_vocabulary
from quintet.tokenizer_proc.nesting_depth import check_grammar, check_schema, schemas_in
from quintet.tokenizer_proc.notations.gbnf import is_gbnf, plain_gbnf
from quintet.tokenizer_proc.notations.regexes import as_rust, escaped
from quintet.tokenizer_proc.notations.schema_keywords import close
from quintet.tokenizer_proc.notations.schemas import plain_schema, schemas_of, with_blanks
from quintet.tokenizer_proc.reasoning_grammar import or_calls, with_reasoning
from quintet.tokenizer_proc.structural_tags import lark_of_tags, lark_of_text
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError, RequestError, invalid
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.structured import FIELD, MAX_COMPILED_BYTES, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_KNOWN = 256
"""Cached grammars; most clients repeat few of them."""
MAX_KNOWN_CHARS = 4 << 20
MAX_BUILD_S = 0.5
"""Processor time. An object of 1000 optional properties takes 0.15 s."""
NUM_TRIED = 64
"""Tokens of the trial answer."""
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Without it, the library follows forced text without end where a lexeme takes the text after it: ``/a+/ "a"``."""
_REPEATS = re.compile(r"[+*{]|%ignore")
"""Found in each grammar with a lexeme of unbounded length."""
NOTHING = "an expression matches no text, such as patternProperties that match only names of properties"
MAX_REASON_CHARS = 300
COMBINED = {"anyOf", "oneOf", "$ref"}
"""Keys with schemas that apply to the same object."""
LOOSENING = {"lenient", "coerce_one_of"}
"""Options with which the library ignores what it cannot enforce."""
_QUOTED = re.compile(r'"([^"\\]+)"')
_LISTING = re.compile(r"\n\s*1 \| ")
"""Start of the grammar listing in an error message of the library."""


class Forms:
    """LRU cache of compiled structured outputs. Loads the library and the vocabulary on first use."""

    def __init__(self, model: ModelConfig, *, is_mock: bool) -> None:
        """``is_mock``: the executor is a mock and cannot enforce grammars."""
        self._model = model
        self._is_mock = is_mock
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._named: dict[str, int] = {}
        self._known: OrderedDict[bytes, StructuredOutputsParams] = OrderedDict()
        self._num_chars = 0

    def is_known(self, wanted: StructuredOutputsParams) -> bool:
        """Return whether `compiled` needs no compilation: a cache hit."""
        return bool(wanted.compiled) or _key(wanted) in self._known

    def compiled(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the structured output, if any, compiled to a grammar. Raises `RequestError`."""
        wanted = params.structured_outputs
        if wanted is None or wanted.compiled:
            return params
        key = _key(wanted)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            found = StructuredOutputsParams(compiled=self._compile(wanted))
            self._keep(key, found)
        return msgspec.structs.replace(params, structured_outputs=found)

    def enforceable(self, spec: RequestSpec, prompt_end: Callable[[], str]) -> SamplingParams:
        """Return a request's parameters with a grammar, if any, that also allows reasoning before the answer.

        ``prompt_end`` returns the end of the prompt's text. Raises `RequestError`.
        """
        params = self.compiled(spec.params)
        marks, parsing, form = self._model.parsers.thinks, spec.parsing, params.structured_outputs
        if params is spec.params or marks is None or parsing is None or not parsing.reasoning or form is None:
            return params
        grammar = with_reasoning(
            form.compiled,
            marks,
            lambda text: lark_of_text(text, self._named),
            prompt_end(),
            is_content=not parsing.requires_calls,
        )
        if len(grammar.encode()) > MAX_COMPILED_BYTES:
            raise refused("the grammar", "it is too long in combination with reasoning: make it smaller")
        return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(compiled=grammar))

    def _keep(self, key: bytes, found: StructuredOutputsParams) -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = found
                self._num_chars += len(key) + len(found.compiled)
            while len(self._known) > MAX_KNOWN or self._num_chars > MAX_KNOWN_CHARS:
                old, forgotten = self._known.popitem(last=False)
                self._num_chars -= len(old) + len(forgotten.compiled)

    def _compile(self, wanted: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher  # see `open_vocabulary`

        vocabulary = self._open()
        kind = wanted.kind
        grammar = _grammar(wanted, kind, self._named)
        if wanted.calls:
            tag = msgspec.json.decode(wanted.calls)
            grammar = or_calls(grammar, lark_of_tags(tag, self._named, _expression, _json_options(wanted)))
        failed, warnings = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary, limits=bounds())
        if failed:
            schema = getattr(wanted, kind) if kind in {"json", "structural_tag"} else None
            raise refused(kind, warnings[0], schema if isinstance(schema, str) else None)
        if (size := len(grammar.encode())) > MAX_COMPILED_BYTES:
            raise refused(
                kind,
                f"its grammar has {size} bytes, but at most {MAX_COMPILED_BYTES} are allowed: make it smaller",
            )
        _try(vocabulary, grammar, kind)
        return grammar

    def _open(self) -> LLTokenizer:
        if self._is_mock:
            raise invalid(
                f"{FIELD} was sent, but the mock executor of this server cannot enforce it: serve a model.",
                FIELD,
            )
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = open_vocabulary(self._model)
                except ConfigError as error:
                    raise invalid(f"{FIELD} cannot be enforced: {error}.", FIELD) from None
                self._named = named_tokens(self._model)
            return self._vocabulary


def _try(vocabulary: LLTokenizer, grammar: str, kind: str) -> None:
    """Reject a grammar that is slow to build: the executor builds it during a step, which delays all requests."""
    began_s = time.thread_time()
    matcher = open_matcher(vocabulary, grammar)
    draw = random.Random(0)
    for _ in range(NUM_TRIED):
        bitmask = matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error().split("<")[0]
            raise refused(kind, NOTHING if "NoExtensionBias" in reason else reason)
        if matcher.is_stopped():
            break
        matcher.consume_token(_any_of(bitmask, draw))
    if (spent_s := time.thread_time() - began_s) > MAX_BUILD_S:
        raise refused(
            kind,
            f"it takes {spent_s:.1f} s to build, but at most {MAX_BUILD_S:g} s are allowed: make it smaller",
        )


def _any_of(bitmask: bytes, draw: random.Random) -> int:
    """Return a random token of a bitmask."""
    allowed = int.from_bytes(bitmask, "little")
    at = draw.randrange(8 * len(bitmask))
    rest = allowed >> at
    if not rest:
        at, rest = 0, allowed
    return at + (rest & -rest).bit_length() - 1


def _key(wanted: StructuredOutputsParams) -> bytes:
    return msgspec.msgpack.encode(wanted)


def _grammar(wanted: StructuredOutputsParams, kind: str, named: Mapping[str, int]) -> str:
    from llguidance import LLMatcher

    value = getattr(wanted, kind)
    if kind in {"json", "json_object"}:
        schema = _schema(value, wanted)
        options = cast("JsonCompileOptions", with_blanks(_json_options(wanted), schema))
        return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=options)
    if kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: {_expression(value)}")
    if kind == "choice":
        # All choices form one expression: thousands of rules take seconds to build.
        return LLMatcher.grammar_from_lark("start: /" + "|".join(map(escaped, value)) + "/")
    if kind == "structural_tag":
        tag = msgspec.json.decode(value)
        written = lark_of_tags(tag, named, _expression, _json_options(wanted))
        return LLMatcher.grammar_from_lark(written + NO_FORCING * ('"regex"' in value))
    grammar = _lark_of(value)
    check_grammar(grammar)
    if any(
        isinstance(each, dict) and LOOSENING & _keys(each.get("x-guidance")) for each in schemas_in(grammar)
    ):
        raise refused(kind, f"x-guidance in a schema has {' or '.join(sorted(LOOSENING))}: remove it")
    return grammar


def _lark_of(grammar: str) -> str:
    """Return a grammar in the library's format. Raises `RequestError`."""
    from llguidance import LLMatcher, grammar_from

    options = NO_FORCING if _REPEATS.search(grammar) else ""
    if not is_gbnf(grammar):
        return LLMatcher.grammar_from_lark(grammar + options)
    try:
        return grammar_from("gbnf", plain_gbnf(grammar)) + options
    except ValueError as error:
        raise refused("grammar", str(error)) from None


def _keys(value: object) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


def _schema(value: str | bool, wanted: StructuredOutputsParams) -> dict[str, Any]:
    """Return the rewritten schema for the library. Raises `RequestError`."""
    if not isinstance(value, str):
        return {"type": "object"}
    schema: dict[str, Any] | bool = plain_schema(msgspec.json.decode(value))
    check_schema(schema)
    if schema is True:
        return {}
    if schema is False:
        raise refused("json", "the schema is false, which no value matches")
    if wanted.disable_additional_properties:
        _close(schema)
    return schema


def _close(schema: dict[str, Any]) -> None:
    """Set ``additionalProperties`` to false for objects with properties, unless the schema sets it."""
    objects = list(schemas_of(schema))
    if any("allOf" in each or ("properties" in each and each.keys() & COMBINED) for each in objects):
        return  # a property of one schema is an additional property of the other
    for each in objects:
        if "properties" in each:
            close(each)


def _json_options(wanted: StructuredOutputsParams) -> JsonCompileOptions:
    """Return the library's options for JSON, without default whitespace.

    They override a schema's ``x-guidance``, so a schema cannot relax its enforcement.
    """
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif wanted.whitespace_pattern:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return options


def _expression(pattern: str) -> str:
    r"""Convert a regular expression to Lark. It always matches the whole text; ``\d`` and ``\w`` are ASCII."""
    from llguidance import regex_to_lark

    if pattern.startswith("^"):
        pattern = pattern[1:]
    if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern):
        pattern = pattern[:-1]
    return f"/{regex_to_lark(as_rust(pattern), 'dw')}/"


def refused(kind: str, reason: str, schema: str | None = None) -> RequestError:
    """Build the error for an unsupported grammar, with the library's reason and the position in the schema."""
    reason = " ".join(_LISTING.split(reason)[0].split())
    if len(reason) > MAX_REASON_CHARS:
        reason = reason[: MAX_REASON_CHARS - 1] + "…"
    where = "" if schema is None else _place(msgspec.json.decode(schema), reason)
    at = f", at {where}" if where else ""
    return invalid(
        f"{kind} cannot be enforced: {reason}{at}. See docs/structured.md for supported features.",
        FIELD,
    )


def _place(schema: Any, reason: str) -> str:
    """Return the JSON pointer of the keyword that ``reason`` names; empty if ambiguous."""
    named = set(_QUOTED.findall(reason))
    for path, each in _objects(schema):
        if key := next((key for key in each if key in named), None):
            return f"{path}/{key}"
        if isinstance(pattern := each.get("pattern"), str) and pattern in reason:
            return f"{path}/pattern"
    return ""


def _objects(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object within a schema, with its JSON pointer."""
    waiting: deque[tuple[str, Any]] = deque([("", schema)])
    while waiting:
        path, each = waiting.popleft()
        if isinstance(each, dict):
            yield path or "", each
            waiting += [(f"{path}/{key}", value) for key, value in each.items()]
        elif isinstance(each, list):
            waiting += [(f"{path}/{i}", value) for i, value in enumerate(each)]
