"""Bounds on the size of the product's Python: limits that only go down, unless a feature is added for users."""

from __future__ import annotations

import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "wire",
    "process",
    "frontend",
    "tokenizer_proc",
    "core",
    "executor",
    "detokenizer_proc",
    "deploy",
    "src",
)
KV_TRANSFER = (
    *(
        "core/kv/tier*",
        "core/kv/*_pool.py",
        "core/kv/prefetch.py",
        "core/kv/chunks.py",
        "core/features/kv_connector.py",
    ),
    *(
        "core/kv_services/kv_tier_client.py",
        "core/kv_services/prefix_export.py",
        "wire/kv_tiers.py",
        "wire/kv_validate.py",
    ),
    *(
        "executor/kv_transfer/*",
        "executor/distributed/parallel/whole_blocks.py",
        "frontend/api/openai/kv_transfer_params.py",
    ),
    *("deploy/config/kv/storage.py", "deploy/config/kv/peers.py", "deploy/config/kv/transfer.py"),
)
"""The connector with its back ends: host memory, disk, peers, stores."""

LIMITS = {"all of the product": (PRODUCT, 108_792), "KV transfer": (KV_TRANSFER, 5_520)}
"""Patterns and most lines. The aims are 85,000 and 4,000."""


def lines_of(patterns: tuple[str, ...]) -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if any(fnmatch(path, each) for each in patterns)]
    return sum((ROOT / path).read_text().count("\n") for path in paths)


@pytest.mark.parametrize("name", LIMITS)
def test_the_product_stays_small(name: str) -> None:
    patterns, most = LIMITS[name]
    assert lines_of(tuple(f"{each}/*" if "/" not in each else each for each in patterns)) <= most
