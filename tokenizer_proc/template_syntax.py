"""Traits of a chat template from its syntax tree: content format, roles, form of call ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from jinja2 import nodes

ContentFormat = Literal["string", "openai"]
OVER_ITEMS = frozenset({"selectattr", "rejectattr", "map", "groupby"})
"""Filters that read the items of their input."""
PART_FIELDS = frozenset({"type", "text"})
CALL_IDS = frozenset({"id", "tool_call_id", "call_id"})
AFTER_NUMBERED_ID = "<|tool_call_argument_begin|>"
"""Kimi K2's mark after the id of a call, which names the function."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """Requirements of a template for messages."""

    content_format: ContentFormat = "string"
    """``openai`` if the template iterates the parts of a content."""
    words: frozenset[str] = frozenset()
    """String constants of the template; it does not support other roles."""
    has_thinking_parts: bool = False
    """True if the template handles parts of type thinking."""
    call_id_form: int | Literal["numbered"] | None = None
    """Required length of call ids, or ``functions.name:0``."""


def traits_of(tree: nodes.Template) -> TemplateTraits:
    """Derive the traits from a template's syntax tree."""
    names = _content_names(tree)
    is_openai = any(_uses_parts(node, names) for node in tree.find_all(nodes.Expr)) or any(
        _is_content(loop.iter, names) for loop in tree.find_all(nodes.For)
    )
    comparisons = list(tree.find_all(nodes.Compare))
    words = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    texts = (*words, *(node.data for node in tree.find_all(nodes.TemplateData)))
    is_numbered = any(AFTER_NUMBERED_ID in text for text in texts)
    return TemplateTraits(
        content_format="openai" if is_openai else "string",
        words=words,
        has_thinking_parts=any(_compares_type(node, "thinking") for node in comparisons),
        call_id_form="numbered" if is_numbered else next(filter(None, map(_id_length, comparisons)), None),
    )


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the variables and macro parameters that hold a message's content."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        found = set(_assigned(tree, names)) | set(_passed(tree, macros, names))
        if found <= names:
            return names
        names |= found


def _assigned(tree: nodes.Template, names: set[str]) -> Iterator[str]:
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _is_content(node.node, names):
            yield node.target.name


def _passed(tree: nodes.Template, macros: dict[str, nodes.Macro], names: set[str]) -> Iterator[str]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            for parameter, value in zip(macros[call.node.name].args, call.args, strict=False):
                if _is_content(value, names):
                    yield parameter.name
            for keyword in call.kwargs:
                if _is_content(keyword.value, names):
                    yield keyword.key


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is a content, or a part of one."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
            return _is_content(node.node, names)
        case nodes.Getitem():
            return _key_of(node) == "content"
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Or():
            return _is_content(node.left, names)
    return False


def _uses_parts(node: nodes.Expr, names: set[str]) -> bool:
    """Return whether an expression reads the parts of a content without a loop."""
    if isinstance(node, nodes.Filter):
        return node.name in OVER_ITEMS and _is_content(node.node, names)
    if _key_of(node) not in PART_FIELDS or not isinstance(node, nodes.Getattr | nodes.Getitem):
        return False
    part = node.node
    is_item = isinstance(part, nodes.Getitem) and isinstance(_key_of(part), int)
    is_first = isinstance(part, nodes.Filter) and part.name in ("first", "last")
    return (
        isinstance(part, nodes.Getitem | nodes.Filter)
        and (is_item or is_first)
        and _is_content(part.node, names)
    )


def _key_of(node: nodes.Node | None) -> str | int | None:
    """Return the key of an attribute or constant subscript; None for other nodes."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        value = node.arg.value
        return value if isinstance(value, str | int) else None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Neg):
        return -1
    return None


def _compares_type(node: nodes.Compare, value: str) -> bool:
    if _key_of(node.expr) != "type":
        return False
    found = [const.value for operand in node.ops for const in operand.expr.find_all(nodes.Const)]
    found += [operand.expr.value for operand in node.ops if isinstance(operand.expr, nodes.Const)]
    return value in found


def _id_length(node: nodes.Compare) -> int | None:
    """Return the length in a comparison of a call id's length; None for other comparisons."""
    left, operand = node.expr, node.ops[0]
    if not (isinstance(left, nodes.Filter) and left.name in ("length", "count")):
        return None
    key = left.node.name if isinstance(left.node, nodes.Name) else _key_of(left.node)
    if key not in CALL_IDS or operand.op not in ("eq", "ne") or not isinstance(operand.expr, nodes.Const):
        return None
    return operand.expr.value if isinstance(operand.expr.value, int) else None
