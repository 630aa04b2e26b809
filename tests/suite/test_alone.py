"""Tests that have the machine for themselves, among those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import pytest
from pathlib import Path

JOURNAL = Path(__file__).parent / "journal"

def note(word):
    with JOURNAL.open("a") as journal:
        journal.write(word + " ")

@pytest.mark.parametrize("number", range(20))
def test_together(number):
    note("begin")
    note("end")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    before = JOURNAL.read_text() if JOURNAL.exists() else ""
    assert before.count("begin") == before.count("end")
    for _ in range(1000):
        assert JOURNAL.exists() == bool(before) and (not before or JOURNAL.read_text() == before)
"""


def test_nothing_runs_beside_a_test_that_is_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # all but what is named takes time
    pytester.makepyfile(test_one=FILE, test_two=FILE)
    plugins = ("-p", "xdist", "-p", "tests.suite.draw", "-p", "tests.suite.alone")
    result = pytester.runpytest_subprocess(*plugins, "-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=2 * 23)
