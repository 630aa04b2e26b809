"""Rejects a run that imports quintet from another checkout, for example because of `PYTHONPATH`.

Such a run would test the sources and kernels of the other checkout.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    spec = find_spec("quintet")
    if spec is None or spec.origin is None:
        return
    root, imported = config.rootpath.resolve(), Path(spec.origin).resolve()
    if not imported.is_relative_to(root):
        raise pytest.UsageError(
            f"the tests are those of {root}, but quintet is imported from {imported.parent}:"
            " unset PYTHONPATH, and install this checkout (`make packages`)"
        )
