"""Functions mostly fit a screen, files mostly stay short. What is longer is named here, with its reason and its own bound.

An exception that is not needed any more fails, so that it is taken out.
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
"""A file of tests has one subject, and a case more is no idea more."""

LONG_FILES = {
    "core/engine.py": (490, "the core's doors: every message's handler in one place"),
    "csrc/cpu/runtime/simd.hpp": (500, "the one file that knows instructions by name"),
    "deploy/config/flags.py": (900, "the one table of flags, a row for each"),
    "detokenizer_proc/incremental.py": (440, "one algorithm, with the cases of each decoder beside it"),
    "executor/backends/cpu/program/graph_builder.py": (500, "every operation of a pass, one after the other"),
    "process/runtime.py": (440, "one loop, and all that a turn of it does"),
    "wire/config.py": (480, "the configuration, a section after the other"),
    "frontend/sessions.py": (450, "a session's whole life: submitted, streamed, resumed, ended"),
}
LONG_FUNCTIONS = {
    "deploy/config/build.py: resolve": (131, "fills the whole configuration, a section after the other"),
    "core/metrics.py: __init__": (92, "the table of the core's figures"),
    "process/runtime.py: child_main": (70, "a process from its first line to its last, in order"),
    "bench/kernels/linear.py: measure": (70, "one measurement, from its arrays to its figures"),
    "core/engine.py: admit": (70, "every reason to refuse a request, in the order in which they are tried"),
    "executor/backends/cuda/ops/rope_kv.py: rope_kv": (
        66,
        "checks of a kernel's dozen arguments, then one launch",
    ),
    "tests/http_api/conftest.py: step": (95, "an engine's answers to every kind of request"),
    "tests/executor/test_ops.py: test_paged_attention": (70, "the reference beside what is tested"),
    "tests/api/toy_server.py: toy_server": (70, "a server in one closure, as its client sees it"),
}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES)


def file_lengths(*folders: str) -> dict[str, int]:
    """By path from the root."""
    return {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(*folders)}


def function_lengths() -> dict[str, int]:
    """By path and name; the longest of those of one name."""
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
    """Say what is longer than it may be, and which exception is none any more."""
    wrong = []
    for name, lines in lengths.items():
        allowed, _ = exceptions.get(name, (bound, ""))
        if lines > allowed:
            wrong.append(
                f"{name}: {lines} lines, of {allowed}: split it by ideas, or name it here with a reason"
            )
    for name in exceptions:
        if lengths.get(name, 0) <= 0.9 * bound:
            wrong.append(f"{name}: well within the bound of {bound} lines: take it out")
    return wrong


def test_files_stay_short() -> None:
    assert too_long(file_lengths(*PRODUCT), MAX_FILE_LINES, LONG_FILES) == []


def test_files_of_tests_stay_short() -> None:
    assert too_long(file_lengths("tests"), MAX_TEST_FILE_LINES, {}) == []


def test_functions_fit_a_screen() -> None:
    assert too_long(function_lengths(), MAX_FUNCTION_LINES, LONG_FUNCTIONS) == []


@pytest.mark.parametrize(("lines", "num_wrong"), [(54, 1), (55, 0), (70, 0), (71, 1)])
def test_an_exception_has_a_bound_and_ends_when_it_is_not_needed(lines: int, num_wrong: int) -> None:
    assert len(too_long({"a": lines, "b": 60}, 60, {"a": (70, "why")})) == num_wrong
