"""Excludes collected modules and tests from garbage collection.

Torch, transformers and some ten thousand tests are a million objects. Repeated collections during startup take a
third of the collection time, and each later one takes a second.
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
