"""Measure the router's CPU time per choice of a server, and its memory, by number of servers and cached prefixes.

    python -m bench.fleet.router_choice [--engines 10 100 1000] [--requests 20000] [--save FILE]

Requests of a trace begin and end in order, without engines. Only the choice is timed, in CPU time.
"""

from __future__ import annotations

import datetime
import gc
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from bench.arguments import command_parser
from bench.fleet.simulation import PrefixHashes, make_router
from bench.fleet.traces import SHAPES, draw
from bench.overhead.run import Machine, _commit, machine
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import HeldPrefixes
from quintet.frontend.load_balancing.prefix_affinity import PIECE_TOKENS
from quintet.wire.config import Routing

CONCURRENCY = 8
"""Concurrent requests of each server."""


class Figures(msgspec.Struct):
    """Results for one number of servers."""

    policy: str
    engines: int
    requests: int
    choice_us: float
    """CPU time of a choice, over the second half of the requests."""
    names: int
    """Prefix hashes in the router."""
    held_bytes: int
    """Growth of the process's resident memory."""


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    figures: list[Figures]


def measure(policy: Routing, num_engines: int, num_requests: int) -> Figures:
    """Choose a server for each request of a trace."""
    trace = draw(SHAPES["mooncake-tool"], num_requests, 3.4 * num_engines, 0, PIECE_TOKENS)
    names, process = PrefixHashes(trace), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    router = make_router(policy, num_engines)
    active: deque[HeldPrefixes] = deque()
    cpu_s = 0.0
    for index in range(num_requests):
        num_tokens = int(trace.num_shared[index] + trace.num_own[index])
        summary = RequestSummary(names.hashes_of(index), num_tokens, True, str(trace.conversation[index]))
        began_s = time.process_time()
        held = router.choose(summary, ())
        cpu_s += (time.process_time() - began_s) * (index >= num_requests // 2)
        assert held is not None
        active.append(held)
        if len(active) > CONCURRENCY * num_engines:
            active.popleft().release()
    gc.collect()
    held_bytes = process.memory_info().rss - before
    num_names = sum(len(server.prefixes) for server in router)
    choice_us = 1e6 * cpu_s / (num_requests - num_requests // 2)
    return Figures(policy, num_engines, num_requests, round(choice_us, 1), num_names, held_bytes)


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--policies", nargs="+", default=["prefix", "load", "session", "round-robin"])
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    policies: Sequence[Routing] = arguments.policies
    results = []
    print("| policy | servers | us per choice | prefix hashes | memory, MiB |\n|---|---|---|---|---|")
    for policy in policies:
        for num_engines in arguments.engines:
            f = measure(policy, num_engines, arguments.requests)
            results.append(f)
            print(
                f"| {policy} | {num_engines} | {f.choice_us} | {f.names} | {f.held_bytes >> 20} |", flush=True
            )
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), results)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
