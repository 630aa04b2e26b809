"""Modules and tests that are collected are there to the end: Python's search for cycles leaves them alone.

Torch, transformers and some ten thousand tests are a million objects. Searched again and again while they come into being, they
are a third of what collecting costs, and a second each time that a test, or what it tests, has cycles searched.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
