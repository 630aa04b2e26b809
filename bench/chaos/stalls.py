"""Stalls after a process is killed or stopped: the longest wait of any of 64 streams for an event.

    python -m bench.chaos.stalls [--rounds 7] [--executor mock] [--save FILE] [-- FLAG …]

Starts one server with further flags of `quintet serve`, for example ``-- --data-parallel-size 2``. Each round sends the same
requests without a failure, then once with each kind of failure. The failure happens when half of the streams have begun; the wait
of the others includes that for their first event. Prints median and maximum over the rounds. All bytes must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import time
from pathlib import Path

import msgspec
from tests.processes.server import Server, serve, wait_until

from bench.chaos.streams import differences, random_requests, run_requests
from bench.overhead.run import _commit, machine

KINDS: dict[str, tuple[str, signal.Signals]] = {
    "tokenizer killed": ("tokenizer", signal.SIGKILL),
    "detokenizer killed": ("detokenizer", signal.SIGKILL),
    "executor killed": ("executor", signal.SIGKILL),
    "executor segfault": ("executor", signal.SIGSEGV),
    "core killed": ("core", signal.SIGKILL),
    "frontend killed": ("frontend", signal.SIGKILL),
}
RANK = "executor-0-rank-1"
NUM_STREAMS = 64


def measure(server: Server, rounds: int) -> dict[str, list[float]]:
    """Return the longest wait of each run, by kind, in seconds."""
    requests = random_requests(1, NUM_STREAMS, (150, 300))
    asyncio.run(run_requests(server.url, requests))
    kinds = {kind: (f"{role}-0", how) for kind, (role, how) in KINDS.items()}
    if f"quintet-{RANK}" in server.children():
        kinds["rank killed"] = (RANK, signal.SIGKILL)
    waits: dict[str, list[float]] = {"undisturbed": [], **{kind: [] for kind in kinds}}
    for number in range(rounds):
        undisturbed = asyncio.run(run_requests(server.url, requests))
        waits["undisturbed"].append(undisturbed.longest_wait_s)
        for kind, (title, how) in kinds.items():

            async def disturb(title: str = title, how: signal.Signals = how) -> None:
                server.children()[f"quintet-{title}"].send_signal(how)

            run = asyncio.run(run_requests(server.url, requests, disturb))
            assert not differences(undisturbed, run, requests), kind
            waits[kind].append(run.longest_wait_s)
            wait_until(lambda: server.get("/readyz")[0] == 200, "all processes ready")
            print(f"round {number + 1}: {kind}: {run.longest_wait_s:.2f} s", flush=True)
    return waits


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the longest stall of a stream after a failure.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--executor", choices=("model", "mock"), default="model")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: further flags of the server")
    arguments = parser.parse_args()
    flags = ["--executor", "mock", "--step-ms", "8"] if arguments.executor == "mock" else []
    flags += arguments.flags
    with serve(*flags, "--max-model-len", "1024", "--frontends", "2", "--max-restarts", "1000") as server:
        waits = measure(server, arguments.rounds)
    print("\n| failure | longest wait of any stream, median (worst), s |\n|---|---|")
    for kind, values in waits.items():
        print(f"| {kind} | {statistics.median(values):.2f} ({max(values):.2f}) |")
    if arguments.save:
        saved = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": _commit(),
            "machine": msgspec.to_builtins(machine()),
            "executor": arguments.executor,
            "flags": arguments.flags,
            "streams": NUM_STREAMS,
            "longest_wait_s": waits,
        }
        arguments.save.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
