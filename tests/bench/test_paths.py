"""The paths of docs/deploy.md, walked as `python -m bench.paths` walks them; that over several GPUs is of `docs/gpu.md`."""

from __future__ import annotations

import pytest
from bench.paths import walk


@pytest.mark.whole
@pytest.mark.parametrize("name", ["one-box", "two-sockets", "replicas", "apart"])
def test_a_path_is_as_promised(name: str) -> None:
    walked = walk(name)
    assert walked.as_promised, walked.said
