"""What a test does to the log ends with it."""

from __future__ import annotations

import logging

import pytest


def test_the_next_test_hears_what_it_would_have_heard(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import logging
        from quintet.process.log import configure_logging

        def test_a_command():
            configure_logging("serve", "ERROR")

        def test_another(caplog):
            logging.getLogger("quintet.part").warning("heard")
            assert [each.message for each in caplog.records] == ["heard"]
        """
    )
    before = logging.getLogger("quintet").level
    result = pytester.runpytest("-p", "tests.suite.logs", "-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2)
    assert logging.getLogger("quintet").level == before
