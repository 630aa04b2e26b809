"""Conversion of structural tags to Lark: text with tagged parts, each with its own schema.

Two syntaxes: ``structures`` with ``triggers`` (free text, in which a trigger must begin one of the structures), and
``format``, a tree of the nodes in `_Writer.NODES`. Names of tokens in begins and ends are converted to tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from quintet.tokenizer_proc.nesting_depth import check_schema
from quintet.tokenizer_proc.notations.regexes import escaped
from quintet.tokenizer_proc.notations.schemas import plain_schema, with_blanks
from quintet.wire.errors import RequestError, invalid

Node = Mapping[str, Any]
ANY_TEXT = r"/(.|\n)*/"
PARAM = "structural_tag"
REPETITIONS = {"optional": "?", "plus": "+", "star": "*"}


def lark_of_tags(
    tag: Node, named: Mapping[str, int], regex: Callable[[str], str], json_options: Mapping[str, Any]
) -> str:
    """Convert a structural tag to a Lark grammar.

    ``named``: token ids by name. ``regex`` converts a regular expression to Lark. ``json_options``: the library's options
    for each schema, extended by bounded whitespace. Raises `RequestError` that names the invalid node.
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
    """Convert a text to Lark. Names of tokens become tokens; the longest name at a position wins."""
    names = sorted((name for name in named if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    written = [
        f"<[{named[part]}]>" if at % 2 else msgspec.json.encode(part).decode()
        for at, part in enumerate(parts)
        if part
    ]
    return " ".join(written) or '""'


def lark_until(literal: str, text: str = ANY_TEXT) -> tuple[str, str]:
    """Return a rule's body and attribute for ``text`` up to and including ``literal``, a result of `lark_of_text`."""
    ends_by_itself = literal.startswith("<[")  # free text has no special tokens
    return f"{text} {literal}", "" if ends_by_itself else "[lazy]"


class _Writer:
    """Builds the rules of one grammar. Each method returns a Lark expression and adds the rules that it needs."""

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
        kind = node.get("type") if isinstance(node, Mapping) else None
        if not isinstance(kind, str) or kind not in self.NODES:
            known = ", ".join(self.NODES)
            raise _bad(where, f"has the type {str(kind)[:100]!r}; it must be one of {known}")
        return self.NODES[kind](self, node, where)

    def literal(self, text: str) -> str:
        """Convert a text, with names of tokens as tokens."""
        return lark_of_text(text, self._named)

    def _rule(self, body: str, attribute: str = "") -> str:
        """Return the name of the rule with this body; equal rules are shared."""
        name = self._names.get((body, attribute))
        if name is None:
            name = self._names[body, attribute] = f"rule_{len(self._rules)}"
            self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _const(self, node: Node, where: str) -> str:
        return self.literal(_text(node, "value", where))

    def _free_text(self, node: Node, where: str) -> str:
        """Return a terminal of any text without those that the node excludes."""
        excluded = _list(node, "excludes", where) if node.get("excludes") else []
        if not all(isinstance(text, str) and text for text in excluded):
            raise _bad(where, "has an invalid text in excludes; each one must be a non-empty string")
        if not excluded:
            return ANY_TEXT
        others = "|".join(escaped(text) for text in excluded)
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {ANY_TEXT} & ~/(.|\\n)*({others})(.|\\n)*/")
        return name

    def _json(self, node: Node, where: str) -> str:
        if node.get("style") not in (None, "json"):
            raise _bad(where, f"has the style {str(node['style'])[:100]!r}; it must be json")
        schema = node.get("json_schema", {})
        if not isinstance(schema, Mapping | bool):
            raise _bad(f"{where}.json_schema", "is not a schema: it must be an object")
        schema = plain_schema(schema)
        check_schema(schema)
        if schema is not False:  # the library reports a schema that matches nothing
            options = with_blanks(self._json_options, schema)
            schema = {**({} if schema is True else schema), "x-guidance": options}
        return self._rule(f"%json {msgspec.json.encode(schema).decode()}")

    def _pattern(self, node: Node, where: str) -> str:
        return self._regex(_text(node, "pattern", where))

    def _any(self, node: Node, where: str) -> str:
        return self._rule(self._free_text(node, where))

    def _sequence(self, node: Node, where: str) -> str:
        inner = self._all(node, "elements", where)
        return self._rule(" ".join(inner))

    def _or(self, node: Node, where: str) -> str:
        return self._rule(" | ".join(self._all(node, "elements", where)))

    def _tag(self, node: Node, where: str) -> str:
        begin = self.literal(_text(node, "begin", where))
        return self._rule(f"{begin} {self._content(node, where)}")

    def _content(self, node: Node, where: str) -> str:
        """Convert a tag's content and end, or alternative ends. Free text ends at the first occurrence of an end."""
        content, end = node.get("content", {}), node.get("end", "")
        ends = _list(node, "end", where) if isinstance(end, list) else [end]
        if not all(isinstance(text, str) for text in ends):
            raise _bad(where, "has an invalid end; it must be a string or a list of strings")
        literals = [self.literal(text) for text in ends]
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            text = self._free_text(content, f"{where}.content")
            return self._rule(" | ".join(self._rule(*lark_until(literal, text)) for literal in literals))
        return f"{self.write(content, f'{where}.content')} ({' | '.join(literals)})"

    def _times(self, node: Node, where: str) -> str:
        """Convert an optional or repeated node."""
        inner = self.write(node.get("content", {}), f"{where}.content")
        if node["type"] != "repeat":
            return self._rule(f"({inner}){REPETITIONS[node['type']]}")
        least, most = node.get("min"), node.get("max")
        if (
            type(least) is not int
            or type(most) is not int
            or not 0 <= least <= (least if most == -1 else most)
        ):
            raise _bad(
                where, "has an invalid min or max; they must be integers, with a max of -1 for no limit"
            )
        return self._rule(f"({inner}){{{least},{'' if most == -1 else most}}}")

    def _triggered(self, node: Node, where: str) -> str:
        """Convert free text in which each trigger must begin one of the tags."""
        triggers = _list(node, "triggers", where)
        if not all(isinstance(trigger, str) for trigger in triggers):
            raise _bad(where, "has an invalid trigger; each one must be a string")
        text, choices = self._free_text(node, where), []
        for i, tag in enumerate(_list(node, "tags", where)):
            place = f"{where}.tags[{i}]"
            begin = _text(tag, "begin", place)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if not trigger:
                raise _bad(place, f"begins with {begin[:100]!r}, but must begin with one of the triggers")
            until = self._rule(*lark_until(self.literal(trigger), text))
            rest = self.literal(begin[len(trigger) :])
            choices.append(f"{until} {rest} {self._content(tag, place)}")
        any_tag = self._rule(" | ".join(choices))
        if node.get("stop_after_first"):
            return any_tag if node.get("at_least_one") else self._rule(f"{any_tag} | {text}")
        return self._rule(f"{any_tag}{'+' if node.get('at_least_one') else '*'} {self._rule(text)}")

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
        "optional": _times,
        "plus": _times,
        "star": _times,
        "repeat": _times,
    }


def _text(node: Node, field: str, where: str) -> str:
    value = node.get(field, "") if isinstance(node, Mapping) else None
    if not isinstance(value, str):
        raise _bad(where, f"has an invalid {field}; it must be a string")
    return value


def _list(node: Node, field: str, where: str) -> list[Any]:
    value = node.get(field) if isinstance(node, Mapping) else None
    if not isinstance(value, list) or not value:
        raise _bad(where, f"has an invalid {field}; it must be a non-empty list")
    return value


def _bad(where: str, problem: str) -> RequestError:
    return invalid(f"structural_tag: {where} {problem}.", PARAM)
