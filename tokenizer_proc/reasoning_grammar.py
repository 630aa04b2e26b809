"""A form of an answer, behind the reasoning that comes before it: what a model thinks has no form.

A prompt that ends with the opening mark begins the reasoning, one that ends with the closing mark has it behind it; else the
answer may begin with it.
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
    """Return the grammar of an answer that has a form or is calls. calls: in Lark."""
    form, *others = _named(grammar)
    grammars = [{**form, "name": _FORM}, *others, {"name": _CALLS, "lark_grammar": calls}]
    return msgspec.json.encode({"grammars": [{"lark_grammar": _EITHER}, *grammars]}).decode()


def behind_reasoning(
    grammar: str, marks: ThinkMarks, literal: Callable[[str], str], prompt: str, *, is_content: bool
) -> str:
    """Return the grammar of an answer that may reason before it takes a form.

    grammar: of the form, in Lark or as the library's JSON. literal: Lark for a text, in which the names of tokens are tokens.
    prompt: its end, which may begin the reasoning, or end it. is_content: whether the form is of content, which some
    formats begin with a header.
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
    """Return the form's grammars, of which the first has a name."""
    if not grammar.lstrip().startswith("{"):
        return [{"name": _FORM, "lark_grammar": grammar}]
    first, *others = msgspec.json.decode(grammar)["grammars"]
    return [{**first, "name": first.get("name") or _FORM}, *others]
