"""Default KV memory on a CPU."""

from __future__ import annotations

from typing import cast

import pytest

from quintet.deploy.config.memory import default_kv_memory
from quintet.wire.kv_spec import KvSpec


@pytest.mark.parametrize(
    ("left", "longest", "expected"),
    [(1000, 10, 125), (1000, 50, 200), (1000, 90, 360), (1000, 300, 400)],
    ids=["an eighth", "four sequences", "more of them", "no more than two fifths"],
)
def test_default_kv_memory_holds_four_long_sequences(left: int, longest: int, expected: int) -> None:
    class Kv:
        bytes_per_block = 10

        def most_blocks(self, max_model_len: int, step_tokens: int) -> int:
            return longest // 10

    assert default_kv_memory(cast("KvSpec", Kv()), left, 0, 0) == expected
