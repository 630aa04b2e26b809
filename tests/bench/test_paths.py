"""Deployment paths of docs/deploy.md, run as `python -m bench.paths` does; the path for several GPUs is in
`docs/gpu.md`.
"""

from __future__ import annotations

import pytest
from bench.paths import walk


@pytest.mark.whole
@pytest.mark.parametrize("name", ["one-box", "two-sockets", "replicas", "apart"])
def test_path_works_as_documented(name: str) -> None:
    walked = walk(name)
    assert walked.as_promised, walked.said
