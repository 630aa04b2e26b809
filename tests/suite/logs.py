"""Restores the log configuration after each test, since a command run in the test's process changes it."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    loggers = [logging.getLogger(), logging.getLogger("quintet")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        return (yield)
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
