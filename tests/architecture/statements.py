"""The statements of a file, those within others too. What is imported and how long functions are, no expression can tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield them in no order that matters."""
    todo: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while todo:
        node = todo.pop()
        yield node
        for block in BLOCKS:
            todo += getattr(node, block, ())
