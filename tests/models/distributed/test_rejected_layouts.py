"""Unsupported layouts are rejected with a reason before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.distributed import layouts_of_rows as layouts
from tests.models.distributed.ranks import config_of
from tests.models.random_checkpoints import write_checkpoint
from tests.models.test_equal import ROWS

from quintet.wire.errors import ConfigError

WORDS = (
    "cannot be sharded: ",
    "cannot be divided into stages: ",
    "valid sizes: ",
    "has no experts",
    "add --enable-expert-parallel",
    "no two ranks share a KV head",
    "has recurrent states, which ranks cannot share",
)


def is_rejected(
    folder: Path, size: int = 1, stages: int = 1, *, experts: bool = False, **switches: int
) -> bool:
    try:
        config_of(folder, size, stages, "float32", "none", "auto", None, experts=experts, **switches)
    except ConfigError as error:
        assert any(each in str(error) for each in WORDS), error
        return True
    return False


@pytest.mark.parametrize("name", ROWS)
def test_unsupported_layouts_are_rejected(name: str, tmp_path: Path) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    assert not is_rejected(tmp_path, stages=2)
    for size in (2, 4):
        assert is_rejected(tmp_path, size) == (name not in layouts.DIVIDED)
        assert is_rejected(tmp_path, size, experts=True) == (name not in layouts.DIVIDED_BY_EXPERTS)
        for experts in (False, True):
            refused = is_rejected(tmp_path, size, experts=experts, invariant=True)
            assert refused == (layouts.INVARIANT.get(name) is not experts)
    for (size, context), names in layouts.KEPT_TOGETHER.items():
        assert is_rejected(tmp_path, size, context=context) == (name not in names)
