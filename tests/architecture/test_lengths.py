"""Bounds on function and file lengths. Exceptions are listed with a reason and their own bound.

An exception that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.architecture.statements import statements

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "wire",
    "process",
    "frontend",
    "tokenizer_proc",
    "core",
    "executor",
    "detokenizer_proc",
    "deploy",
    "csrc",
    "bench",
)
SUFFIXES = {".py", ".cpp", ".hpp", ".cu", ".cuh"}

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600
"""A test file has one subject; further cases add length but no ideas."""

LONG_FILES = {
    "csrc/cpu/runtime/simd.hpp": (500, "the one file that knows instructions by name"),
    "deploy/config/flags.py": (600, "the one table of flags, a row for each"),
    "executor/backends/cpu/program/graph_builder.py": (500, "every operation of a pass in order"),
    "wire/config.py": (510, "the configuration, section by section"),
}
LONG_FUNCTIONS = {
    "core/metrics.py: __init__": (92, "the table of the core's metrics"),
    "process/child.py: child_main": (70, "a process from its first line to its last, in order"),
    "bench/kernels/linear.py: measure": (70, "one measurement, from its arrays to its results"),
    "executor/backends/cuda/ops/rope_kv.py: rope_kv": (
        66,
        "checks of a kernel's dozen arguments, then one launch",
    ),
    "tests/http_api/conftest.py: step": (95, "an engine's answers to every kind of request"),
    "tests/executor/test_ops.py: test_paged_attention": (70, "the reference next to the tested operation"),
    "tests/api/toy_server.py: toy_server": (70, "a server in one closure, as its client sees it"),
}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES)


def file_lengths(*folders: str) -> dict[str, int]:
    """Return lines by path from the root."""
    return {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(*folders)}


def function_lengths() -> dict[str, int]:
    """Return lines by path and name; the longest function of each name."""
    lengths: dict[str, int] = {}
    for path in sources(*PRODUCT, "tests"):
        if path.suffix != ".py":
            continue
        for node in statements(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                name = f"{path.relative_to(ROOT)}: {node.name}"
                lengths[name] = max(lengths.get(name, 0), node.end_lineno - node.lineno + 1)
    return lengths


def too_long(lengths: dict[str, int], bound: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Return items beyond their bound, and exceptions that are not needed."""
    wrong = []
    for name, lines in lengths.items():
        allowed, _ = exceptions.get(name, (bound, ""))
        if lines > allowed:
            wrong.append(f"{name}: {lines} lines, of {allowed}: split it, or add it here with a reason")
    for name in exceptions:
        if lengths.get(name, 0) <= 0.9 * bound:
            wrong.append(f"{name}: well within the bound of {bound} lines: remove it")
    return wrong


def test_files_stay_short() -> None:
    assert too_long(file_lengths(*PRODUCT), MAX_FILE_LINES, LONG_FILES) == []


def test_files_of_tests_stay_short() -> None:
    assert too_long(file_lengths("tests"), MAX_TEST_FILE_LINES, {}) == []


def test_functions_fit_a_screen() -> None:
    assert too_long(function_lengths(), MAX_FUNCTION_LINES, LONG_FUNCTIONS) == []


@pytest.mark.parametrize(("lines", "num_wrong"), [(54, 1), (55, 0), (70, 0), (71, 1)])
def test_exceptions_have_a_bound_and_must_be_needed(lines: int, num_wrong: int) -> None:
    assert len(too_long({"a": lines, "b": 60}, 60, {"a": (70, "why")})) == num_wrong
