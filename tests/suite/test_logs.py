"""Log configuration is restored after each test."""

from __future__ import annotations

import logging

import pytest


def test_log_level_is_restored_for_the_next_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import logging
        from quintet.process.log import configure_logging

        def test_a_command():
            configure_logging("serve", "ERROR")

        def test_another(caplog):
            logging.getLogger("quintet.part").warning("logged")
            assert [each.message for each in caplog.records] == ["logged"]
        """
    )
    before = logging.getLogger("quintet").level
    result = pytester.runpytest("-p", "tests.suite.logs", "-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=2)
    assert logging.getLogger("quintet").level == before
