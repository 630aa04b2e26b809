"""Grammar of an answer after free-form reasoning.

A prompt that ends with the opening mark has started the reasoning. A prompt that ends with the closing mark has finished
it. Otherwise the answer may start with reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quintet.tokenizer_proc.structural_tags import lark_until
from quintet.wire.channels import is_inside
from quintet.wire.config import ThinkMarks

_BLANKS = r"/[ \t\r\n]{0,4}/"
_FORM, _CALLS = "form", "calls"
_EITHER = f"start: @{_FORM} | @{_CALLS}"


def or_calls(grammar: str, calls: str) -> str:
    """Return the grammar of an answer in ``grammar`` or of tool calls. ``calls`` is in Lark."""
    form, *others = _named(grammar)
    grammars = [{**form, "name": _FORM}, *others, {"name": _CALLS, "lark_grammar": calls}]
    return msgspec.json.encode({"grammars": [{"lark_grammar": _EITHER}, *grammars]}).decode()


def with_reasoning(
    grammar: str, marks: ThinkMarks, literal: Callable[[str], str], prompt: str, *, is_content: bool
) -> str:
    """Return ``grammar`` extended by optional reasoning before it.

    ``grammar`` is in Lark or in the library's JSON. ``literal`` converts a text to Lark, with names of tokens as tokens.
    ``prompt`` is the end of the prompt, which may start or end the reasoning. With ``is_content``, the answer may start
    with the format's header for content.
    """
    form, *others = _named(grammar)
    is_either = form.get("lark_grammar") == _EITHER
    ends = [lark_until(literal(mark)) for mark in marks.closes]
    rules = [f"until_{i}{attribute}: {body}" for i, (body, attribute) in enumerate(ends)]
    closed = " | ".join(f"until_{i}" for i in range(len(marks.closes)))
    opened = " | ".join(literal(mark) for mark in marks.opens)
    prompt = prompt.rstrip()
    thought = "" if prompt.endswith(tuple(marks.closes)) else "(opened closed)?"
    if is_inside(prompt, marks.opens, marks.closes, marks.begins_inside):
        thought = "closed"
    answer = literal(marks.answer) if marks.answer and is_content else ""
    inner = f"({answer} @{_FORM} | @{_CALLS})" if is_either else f"{answer} @{form['name']}"
    outer = "\n".join(
        (
            f"start: {thought} {inner}",
            f"opened: {opened}",
            f"closed: ({closed}) {_BLANKS}",
            *rules,
        )
    )
    grammars = others if is_either else [form, *others]
    return msgspec.json.encode({"grammars": [{"lark_grammar": outer}, *grammars]}).decode()


def _named(grammar: str) -> list[dict[str, Any]]:
    """Return the grammars of ``grammar``; the first one has a name."""
    if not grammar.lstrip().startswith("{"):
        return [{"name": _FORM, "lark_grammar": grammar}]
    first, *others = msgspec.json.decode(grammar)["grammars"]
    return [{**first, "name": first.get("name") or _FORM}, *others]
