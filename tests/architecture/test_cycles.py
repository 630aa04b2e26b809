"""No two modules import each other, by whatever way round: imports in functions and for the type checker count."""

import ast
from pathlib import Path

from tests.architecture.statements import statements

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("wire", "process", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "deploy")

ALLOWED = {
    frozenset(
        {"quintet.core.hooks", "quintet.core.scheduler_state"}
    ): "hooks are functions of the state that holds them",
}
"""Cycles that stay, and why."""


def modules() -> dict[str, Path]:
    """Every module by the name it is imported by."""
    found = {}
    for prefix, folder in (*(("quintet.", room) for room in ROOMS), ("", "bench")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports anywhere in it."""
    names = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & known.keys() or {str(node.module)}
    return names & known.keys()


def on_a_way_back(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules from which a way leads back to them: peel off whoever imports, or is imported by, nobody left."""
    left = dict(graph)
    while True:
        used = set().union(*left.values()) if left else set()
        inner = {name: targets & left.keys() for name, targets in left.items() if name in used}
        inner = {name: targets & inner.keys() for name, targets in inner.items()}
        inner = {name: targets for name, targets in inner.items() if targets}
        if inner == left:
            return set(left)
        left = inner


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules each of which reaches all others of its set."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reached = {name: reach(name) for name in on_a_way_back(graph)}
    return {
        frozenset(other for other in reached if other in there and name in reached[other])
        for name, there in reached.items()
        if name in there
    }


def test_modules_do_not_import_each_other() -> None:
    known = modules()
    graph = {name: imported(path, known) - {name} for name, path in known.items()}
    assert len(graph) > 200
    found = cycles(graph)
    assert found - ALLOWED.keys() == set(), "break it, or say in ALLOWED why it stays"
    assert ALLOWED.keys() - found == set(), "no cycle any more: take it out of ALLOWED"


def test_a_cycle_is_found_by_any_way_round() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles(graph) == {frozenset("abc"), frozenset("de")}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
