"""Row ``kill`` of docs/gpu.md: an executor killed under load changes no byte, and its memory is the device's again."""

from __future__ import annotations

import asyncio
import signal

import torch
from bench.chaos.streams import differences, random_requests, run_requests
from bench.gpu.figures import Figure, Report
from tests.processes.server import serve, wait_until

NUM_STREAMS = 64
KV_BYTES = 2 << 30
SLACK_BYTES = 256 << 20
"""Contexts, caches and graphs differ slightly between boots. A leaked executor would hold a context, weights and KV: about
1 GB more.
"""
FLAGS = ("--batch-invariant", "--max-model-len", "1024", "--max-restarts", "100")


def test_killed_executor_changes_no_byte_and_frees_its_memory(device_name: str, report: Report) -> None:
    requested = random_requests(1, NUM_STREAMS, (60, 160))
    idle_bytes = free_bytes(device_name)
    memory = f"{KV_BYTES >> 20}MiB" if device_name == "cuda" else "8MiB"
    with serve("--device", device_name, "--kv-cache-memory", memory, *FLAGS) as server:
        undisturbed = asyncio.run(run_requests(server.url, requested))
        assert all(
            result.status == 200 and result.is_done and not result.error for result in undisturbed.results
        )
        used_bytes = idle_bytes - free_bytes(device_name)

        async def disturb() -> None:
            server.children()["quintet-executor-0"].send_signal(signal.SIGKILL)

        run = asyncio.run(run_requests(server.url, requested, disturb))
        assert not differences(undisturbed, run, requested)
        assert all(result.is_done for result in run.results)
        report.figure(Figure("longest pause of a stream", run.longest_wait_s, "s"))
        wait_until(lambda: server.gauge("quintet:live_requests") == 0, "no live requests")
        used_now = idle_bytes - free_bytes(device_name)
        report.figure(Figure("device memory before the kill", used_bytes / 2**20, "MiB"))
        report.figure(Figure("device memory with its successor", used_now / 2**20, "MiB"))
        assert used_now <= used_bytes + SLACK_BYTES
    wait_until(
        lambda: free_bytes(device_name) >= idle_bytes - SLACK_BYTES,
        "memory given back after the server's end",
    )


def free_bytes(device_name: str) -> int:
    """Return the free device memory in bytes; 0 for a CPU."""
    return torch.cuda.mem_get_info()[0] if device_name == "cuda" else 0
