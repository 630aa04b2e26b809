"""Garbage collection of collected tests."""

from __future__ import annotations

import pytest

FILE = """
import gc

MADE = [[]]
SEARCHED = gc.isenabled()

def test_collected_objects_are_frozen():
    assert not SEARCHED
    assert gc.isenabled()
    assert not any(each is MADE for each in gc.get_objects())
"""


def test_collected_tests_are_not_garbage_collected(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_file=FILE)
    pytester.inline_run("-p", "tests.suite.collecting").assertoutcome(passed=1)
