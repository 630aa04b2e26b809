"""`kill -9` during reads and writes of a shared KV store, and corrupted runs: all responses stay the same."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from bench.chaos.streams import StreamRequest, random_requests, run_requests

from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.chaos.test_ranks import RANK
from tests.processes.kv.test_kv_store import num_chunks
from tests.processes.server import Server, serve, wait_until

NUM_STREAMS = 24
PREFIXES = [
    f"{subject} {verb} under the bridge, " * 30
    for subject, verb in (("A river", "runs"), ("The cat", "sleeps"))
]
"""Each is longer than a run."""


def long_requests() -> list[StreamRequest]:
    """Return requests of which many share a prefix."""
    requests = random_requests(1, NUM_STREAMS, (40, 100))
    for number, each in enumerate(requests):
        if "prompt" in each.body:
            each.body["prompt"] = PREFIXES[number % 2] + each.body["prompt"]
        else:
            each.body["messages"][0]["content"] = PREFIXES[number % 2] + each.body["messages"][0]["content"]
    return requests


def num_fetched_blocks(server: Server) -> int:
    server.await_metrics()
    return int(server.gauge_of("quintet:kv_store_blocks_total", "fetched"))


def corrupt(folder: Path, rng: random.Random) -> None:
    """Overwrite random bytes of stored runs."""
    for path in folder.rglob("*/*/*"):
        if rng.random() < 0.3 and path.is_file():
            with path.open("r+b") as run:
                run.seek(rng.randrange(max(1, path.stat().st_size)))
                run.write(rng.randbytes(64))


ROLES = (["executor"], ["core"], ["core", "executor", "executor"])
LAST_RANKS = ([RANK], ["executor"], [RANK, "core", RANK])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("scheme", "size", "stages"),
    [("file", 1, 1), ("local", 1, 1), ("file", 2, 1), ("local", 2, 2)],
)
def test_kill_during_store_reads_and_writes(scheme: str, size: int, stages: int, tmp_path: Path) -> None:
    """Includes the last rank, which may still have a part of a run to write."""
    if scheme == "local":
        pytest.importorskip("fsspec")
        (tmp_path / "kv").mkdir()  # like a bucket, the folder must exist
    rng, last = random.Random(1), size * stages - 1
    requests = long_requests()
    flags = (*COMMON, *little_memory("model", NUM_STREAMS))
    flags += ("--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(stages))
    with serve(*flags) as server:
        reference = asyncio.run(run_requests(server.url, requests))
    store = (*flags, "--block-size", "16", "--kv-store", f"{scheme}://{tmp_path}/kv")
    num_fetched = 0
    for roles in LAST_RANKS if last else ROLES:
        with serve(*store) as one, serve(*store) as other:

            def is_used(server: Server = one) -> bool:
                return num_chunks(server, "stored") + num_fetched_blocks(server) > 0

            async def disturb(roles: list[str] = roles) -> None:
                await asyncio.to_thread(wait_until, is_used, "runs are stored or fetched")
                for role in roles:
                    for server in (one, other):
                        kill(server, role, index=last if role == RANK else 0)
                    await asyncio.sleep(rng.choice([0.05, 0.3]))
                corrupt(tmp_path / "kv", rng)

            async def both() -> None:
                first = asyncio.create_task(run_requests(one.url, requests, disturb))
                second = await run_requests(other.url, requests)
                assert_same(one, reference, await first, requests)
                assert_same(other, reference, second, requests)

            asyncio.run(both())
            num_fetched += num_fetched_blocks(one) + num_fetched_blocks(other)
            one.process.kill()
            other.process.kill()
    assert num_fetched, "no block was fetched"
