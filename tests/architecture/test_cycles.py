"""No import cycles between modules, including imports in functions and for type checkers."""

import ast
from pathlib import Path

from tests.architecture.statements import statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "process", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "deploy")

ALLOWED = {
    frozenset(
        {"quintet.core.hooks", "quintet.core.scheduler_state", "quintet.core.step_builder"}
    ): "hooks are functions of the state that holds them, and of the step",
}
"""Permitted cycles, with reasons."""


def modules() -> dict[str, Path]:
    """Return every module by its import name."""
    found = {}
    for prefix, folder in (*(("quintet.", package) for package in PACKAGES), ("", "bench")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the repository's modules that a file imports."""
    names = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & known.keys() or {str(node.module)}
    return names & known.keys()


def cycle_candidates(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that can be on a cycle: repeatedly drop modules without imports or importers."""
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
    """Return the strongly connected sets of modules."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reached = {name: reach(name) for name in cycle_candidates(graph)}
    return {
        frozenset(other for other in reached if other in reachable and name in reached[other])
        for name, reachable in reached.items()
        if name in reachable
    }


def test_modules_do_not_import_each_other() -> None:
    known = modules()
    graph = {name: imported(path, known) - {name} for name, path in known.items()}
    assert len(graph) > 200
    found = cycles(graph)
    assert found - ALLOWED.keys() == set(), "break the cycle, or add it to ALLOWED with a reason"
    assert ALLOWED.keys() - found == set(), "no cycle: remove it from ALLOWED"


def test_cycles_of_any_length_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles(graph) == {frozenset("abc"), frozenset("de")}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
