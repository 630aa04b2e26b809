"""Deployment paths of docs/deploy.md, run as `python -m bench.paths` does; the path for several GPUs is in
`docs/gpu.md`.
"""

from __future__ import annotations

import pytest
from bench.paths import run_path


@pytest.mark.whole
@pytest.mark.parametrize("name", ["one-machine", "two-sockets", "replicas", "disaggregated"])
def test_path_works_as_documented(name: str) -> None:
    result = run_path(name)
    assert result.passed, result.message
