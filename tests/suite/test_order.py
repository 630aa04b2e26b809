"""Order of test files."""

from __future__ import annotations

from pathlib import Path

from tests.suite.order import in_order


def test_waiting_files_alternate_with_computing_ones() -> None:
    names = ["api/a", "chaos/b", "core/c", "executor/d", "models/e", "models/f", "processes/g", "text/h"]
    ordered = in_order([Path(name) for name in names])
    expected = ["chaos/b", "models/e", "processes/g", "models/f", "api/a", "executor/d", "core/c", "text/h"]
    assert [str(path) for path in ordered] == expected
