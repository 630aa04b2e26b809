"""Statements of a file, including nested ones; expressions are skipped for speed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield all statements, in no particular order."""
    todo: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while todo:
        node = todo.pop()
        yield node
        for block in BLOCKS:
            todo += getattr(node, block, ())
