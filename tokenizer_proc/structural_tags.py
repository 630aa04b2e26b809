"""Structural tags to Lark: text with parts between tags that have schemas of their own.

Two spellings: ``structures`` and ``triggers`` (any text; what begins with a trigger must be one of the structures), and
``format``, a tree of the nodes in `_Writer.NODES`. Names of tokens inside of begins and ends are recognised as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from quintet.tokenizer_proc.json_blanks import with_blanks
from quintet.tokenizer_proc.nesting_depth import check_schema
from quintet.tokenizer_proc.schemas import plain_schema
from quintet.wire.errors import ErrorCode, RequestError

Node = Mapping[str, Any]
ANY_TEXT = r"/(.|\n)*/"
PARAM = "structural_tag"


def lark_of_tags(
    tag: Node, named: Mapping[str, int], regex: Callable[[str], str], json_options: Mapping[str, Any]
) -> str:
    """Return the grammar. named: ids of tokens that are written by their names; regex: what makes an expression one of Lark's.

    json_options: how JSON is written, as the library has it; each schema has them, and bounded blanks of its own.
    Raises `RequestError` naming the node that is not as it must be.
    """
    writer = _Writer(named, regex, json_options)
    if "format" in tag:
        return writer.grammar(tag["format"], "format")
    structures, triggers = _list(tag, "structures", PARAM), _list(tag, "triggers", PARAM)
    tags = [
        {
            "begin": _text(each, "begin", f"structures[{i}]"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": _text(each, "end", f"structures[{i}]"),
        }
        for i, each in enumerate(structures)
    ]
    return writer.grammar({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "structures")


def lark_of_text(text: str, named: Mapping[str, int]) -> str:
    """Return what allows this text, in which the names of tokens are tokens: of those that begin at one place the longest."""
    names = sorted((name for name in named if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    written = [
        f"<[{named[part]}]>" if at % 2 else msgspec.json.encode(part).decode()
        for at, part in enumerate(parts)
        if part
    ]
    return " ".join(written) or '""'


def lark_until(literal: str) -> tuple[str, str]:
    """Return what allows any text up to what `lark_of_text` returned, inclusive: a rule's body, and its attribute."""
    ends_by_itself = literal.startswith("<[")  # a token: free text has none
    return f"{ANY_TEXT} {literal}", "" if ends_by_itself else "[lazy]"


class _Writer:
    """The rules of one grammar. Each method returns an expression of Lark, and adds the rules that it needs."""

    def __init__(
        self, named: Mapping[str, int], regex: Callable[[str], str], json_options: Mapping[str, Any]
    ) -> None:
        self._named = named
        self._regex = regex
        self._json_options = json_options
        self._rules: list[str] = []
        self._names: dict[tuple[str, str], str] = {}

    def grammar(self, node: Node, where: str) -> str:
        start = self.write(node, where)
        return "\n".join((f"start: {start}", *self._rules))

    def write(self, node: Node, where: str) -> str:
        """Return what a node allows."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        if kind not in self.NODES:
            known = ", ".join(self.NODES)
            raise _bad(where, f"has the type {str(kind)[:100]!r}; it must be one of {known}")
        return self.NODES[kind](self, node, where)

    def literal(self, text: str) -> str:
        """Return what allows this text, in which the names of tokens are tokens."""
        return lark_of_text(text, self._named)

    def _rule(self, body: str, attribute: str = "") -> str:
        """Return the name of a rule; what is the same is one rule."""
        name = self._names.get((body, attribute))
        if name is None:
            name = self._names[body, attribute] = f"rule_{len(self._rules)}"
            self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _const(self, node: Node, where: str) -> str:
        return self.literal(_text(node, "value", where))

    def _json(self, node: Node, where: str) -> str:
        schema = node.get("json_schema", {})
        if not isinstance(schema, Mapping | bool):
            raise _bad(f"{where}.json_schema", "is no schema: it must be an object")
        schema = plain_schema(schema)
        check_schema(schema)
        if schema is not False:  # which nothing matches, and the library says so
            options = with_blanks(self._json_options, schema)
            schema = {**({} if schema is True else schema), "x-guidance": options}
        return self._rule(f"%json {msgspec.json.encode(schema).decode()}")

    def _pattern(self, node: Node, where: str) -> str:
        return self._regex(_text(node, "pattern", where))

    def _any(self, node: Node, where: str) -> str:
        return self._rule(ANY_TEXT)

    def _sequence(self, node: Node, where: str) -> str:
        inner = self._all(node, "elements", where)
        return self._rule(" ".join(inner))

    def _or(self, node: Node, where: str) -> str:
        return self._rule(" | ".join(self._all(node, "elements", where)))

    def _tag(self, node: Node, where: str) -> str:
        begin = self.literal(_text(node, "begin", where))
        return self._rule(f"{begin} {self._content(node, where)}")

    def _content(self, node: Node, where: str) -> str:
        """Return what follows a tag's begin. Free text ends where the tag's end comes first."""
        content, end = node.get("content", {}), _text(node, "end", where)
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            return self._until(self.literal(end))
        return f"{self.write(content, f'{where}.content')} {self.literal(end)}"

    def _until(self, literal: str) -> str:
        """Return what allows any text up to this one, inclusive."""
        return self._rule(*lark_until(literal))

    def _triggered(self, node: Node, where: str) -> str:
        """Any text; what begins with a trigger goes on as one of the tags."""
        triggers = _list(node, "triggers", where)
        choices = []
        for i, tag in enumerate(_list(node, "tags", where)):
            place = f"{where}.tags[{i}]"
            begin = _text(tag, "begin", place)
            trigger = next((each for each in triggers if begin.startswith(str(each))), None)
            if not trigger:
                raise _bad(place, f"begins with {begin[:100]!r}, which begins with none of the triggers")
            until = self._until(self.literal(str(trigger)))
            rest = self.literal(begin[len(trigger) :])
            choices.append(f"{until} {rest} {self._content(tag, place)}")
        any_tag = self._rule(" | ".join(choices))
        if node.get("stop_after_first"):
            return any_tag if node.get("at_least_one") else self._rule(f"{any_tag} | {ANY_TEXT}")
        return self._rule(f"{any_tag}{'+' if node.get('at_least_one') else '*'} {self._rule(ANY_TEXT)}")

    def _separated(self, node: Node, where: str) -> str:
        tags = [self._tag(tag, f"{where}.tags[{i}]") for i, tag in enumerate(_list(node, "tags", where))]
        one = self._rule(" | ".join(tags))
        several = one
        if not node.get("stop_after_first"):
            several = self._rule(f"{one} ({self.literal(_text(node, 'separator', where))} {one})*")
        return several if node.get("at_least_one") else f"({several})?"

    def _all(self, node: Node, field: str, where: str) -> list[str]:
        return [self.write(each, f"{where}.{field}[{i}]") for i, each in enumerate(_list(node, field, where))]

    NODES: ClassVar[dict[str, Callable[[_Writer, Node, str], str]]] = {
        "const_string": _const,
        "json_schema": _json,
        "regex": _pattern,
        "any_text": _any,
        "sequence": _sequence,
        "or": _or,
        "tag": _tag,
        "triggered_tags": _triggered,
        "tags_with_separator": _separated,
    }


def _text(node: Node, field: str, where: str) -> str:
    value = node.get(field, "") if isinstance(node, Mapping) else None
    if not isinstance(value, str):
        raise _bad(where, f"has no text as its {field}")
    return value


def _list(node: Node, field: str, where: str) -> list[Any]:
    value = node.get(field) if isinstance(node, Mapping) else None
    if not isinstance(value, list) or not value:
        raise _bad(where, f"has no {field}; it must be a list of at least one")
    return value


def _bad(where: str, what: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"structural_tag: {where} {what}.", PARAM)
