"""`kill -9` during reads and writes of KV on disk, and corrupted blocks: all responses stay the same."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from bench.chaos.streams import random_requests, run_requests

from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.chaos.test_ranks import RANK
from tests.processes.kv.test_kv_disk import num_blocks
from tests.processes.server import Server, serve, wait_until

NUM_STREAMS = 24


def corrupt(folder: Path, rng: random.Random) -> None:
    """Overwrite random bytes of the blocks on disk."""
    with (folder / "engine-0" / "blocks.kv").open("r+b") as blocks:
        size = blocks.seek(0, 2)
        for _ in range(30):
            blocks.seek(rng.randrange(max(1, size)))
            blocks.write(rng.randbytes(64))


ROLES = (["executor"], ["core"], ["core", "executor", "executor"])
LAST_RANKS = ([RANK], ["executor"], [RANK, "core", RANK])


@pytest.mark.whole
@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_kill_during_disk_reads_and_writes(size: int, stages: int, tmp_path: Path) -> None:
    """Includes the last rank, which may still have a part of a block to write."""
    rng, last = random.Random(1), size * stages - 1
    requests = random_requests(1, NUM_STREAMS, (40, 100))
    flags = (*COMMON, *little_memory("model", NUM_STREAMS))
    flags += ("--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(stages))
    with serve(*flags) as server:
        reference = asyncio.run(run_requests(server.url, requests))
    flags = (*flags, "--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "8MiB")
    num_fetched = 0.0
    for roles in LAST_RANKS if last else ROLES:
        with serve(*flags) as server:

            def is_used(server: Server = server) -> bool:
                return num_blocks(server, "stored") + num_blocks(server, "fetched") > 0

            async def disturb(roles: list[str] = roles) -> None:
                await asyncio.to_thread(wait_until, is_used, "blocks are written or read")
                for role in roles:
                    kill(server, role, index=last if role == RANK else 0)
                    await asyncio.sleep(rng.choice([0.05, 0.3]))
                corrupt(tmp_path / "kv", rng)

            assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
            assert_same(server, reference, asyncio.run(run_requests(server.url, requests)), requests)
            num_fetched += num_blocks(server, "fetched")
            server.process.kill()
    assert num_fetched, "nothing was read from the disk"
