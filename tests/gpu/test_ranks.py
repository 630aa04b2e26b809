"""Row ``ranks`` of docs/gpu.md: tensor parallelism over two GPUs, end to end, and a killed rank.

Skipped with one GPU. `--device cpu` runs the ranks on the CPU.
"""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest
import torch
from bench.chaos.streams import differences, random_requests, run_requests
from tests.gpu.test_serve import COMMON, completions
from tests.processes.server import serve

RANKS = ("--tensor-parallel-size", "2")
FLAGS = (
    "--batch-invariant",
    "--max-model-len",
    "1024",
    "--kv-cache-memory",
    "64MiB",
    "--max-restarts",
    "100",
)
NUM_STREAMS = 32


@pytest.fixture(autouse=True)
def two_devices(device_name: str) -> None:
    count = torch.cuda.device_count() if device_name == "cuda" else 2
    if count < 2:
        pytest.skip(f"takes 2 GPUs, and there is {count}")


@pytest.mark.parametrize(
    "flags", [(), ("--enforce-eager",), ("--batch-invariant",)], ids=["default", "eager", "invariant"]
)
def test_fp32_answers_are_those_of_one_device(device_name: str, flags: tuple[str, ...]) -> None:
    texts = []
    for ranks in ((), RANKS):
        with serve("--device", device_name, "--dtype", "float32", *flags, *ranks, *COMMON) as server:
            texts.append(completions(server))
    assert texts[0] == texts[1]


def test_killed_rank_changes_no_byte(device_name: str) -> None:
    """All ranks restart, and the streams resume."""
    requested = random_requests(1, NUM_STREAMS, (60, 160))
    with serve("--device", device_name, *RANKS, *FLAGS) as server:
        undisturbed = asyncio.run(run_requests(server.url, requested))

        async def disturb() -> None:
            executor = psutil.Process(server.children()["quintet-executor-0"].pid)
            [rank] = [each for each in executor.children() if "rank-1" in " ".join(each.cmdline())]
            rank.send_signal(signal.SIGKILL)

        run = asyncio.run(run_requests(server.url, requested, disturb))
        assert not differences(undisturbed, run, requested)
        assert all(result.is_done for result in run.results)
