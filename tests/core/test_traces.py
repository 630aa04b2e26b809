"""Random traces, audited after every change: tokens are independent of other requests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .trace import assert_served, random_trace


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_random_trace(seed: int, depth: int) -> None:
    assert_served(*random_trace(seed, 250, depth))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_trace_in_stages(seed: int, stages: int) -> None:
    assert_served(*random_trace(seed, 250, stages + 1, num_host_blocks=20 * (seed % 2), stages=stages))


@pytest.mark.parametrize("num_host_blocks", [1, 5, 100])
@pytest.mark.parametrize("seed", range(30))
def test_random_trace_with_host_memory(seed: int, num_host_blocks: int) -> None:
    poisonous = 0.05 if seed % 3 == 0 else 0.0
    assert_served(*random_trace(seed, 250, 1 + seed % 3, poisonous, num_host_blocks))


def test_random_traces_swap() -> None:
    worlds = [random_trace(seed, 250, depth=2, num_host_blocks=20)[0] for seed in range(6)]
    swapped = [world.engine.state.counters.swap_in_blocks for world in worlds if world.engine.state]
    assert sum(1 for blocks in swapped if blocks) > 2, swapped


PRINT_PLANS = """
import hashlib, sys
sys.path.insert(0, {root!r})
from tests.core.trace import random_trace
digest = hashlib.sha256()
for seed in range(6):
    for plan in random_trace(seed, 200, depth=2, num_host_blocks=4 * (seed % 2))[0].plans:
        digest.update(plan)
print(digest.hexdigest())
"""


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    root = str(Path(__file__).parents[2])
    digests = {
        subprocess.run(
            [sys.executable, "-c", PRINT_PLANS.format(root=root)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == hashlib.sha256().digest_size * 2
