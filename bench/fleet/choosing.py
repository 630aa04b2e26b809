"""Time of one choice of the router as servers and remembered prefixes grow, and its memory.

    python -m bench.fleet.choosing [--engines 10 100 1000] [--requests 20000] [--save FILE]

Requests of a trace come and go as they would, without engines; only the choice is timed, in processor time.
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
from bench.fleet.play import Names, make_router
from bench.fleet.traces import SHAPES, draw
from bench.overhead.run import Machine, _commit, machine
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import HeldPrefixes
from quintet.frontend.load_balancing.prefix_affinity import PIECE_TOKENS
from quintet.wire.config import Routing

OPEN_EACH = 8
"""Requests that each server has at once."""


class Figures(msgspec.Struct):
    """One number of servers."""

    policy: str
    engines: int
    requests: int
    choice_us: float
    """Of the processor, from a request's names to its server, after the first half of all."""
    names: int
    """Of beginnings that are remembered."""
    held_bytes: int
    """By the process more than before."""


class Report(msgspec.Struct):
    """The file."""

    date: str
    commit: str
    machine: Machine
    figures: list[Figures]


def measure(policy: Routing, num_engines: int, num_requests: int) -> Figures:
    """Choose for a whole trace."""
    trace = draw(SHAPES["mooncake-tool"], num_requests, 3.4 * num_engines, 0, PIECE_TOKENS)
    names, process = Names(trace), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    router = make_router(policy, num_engines)
    going: deque[HeldPrefixes] = deque()
    spent_s = 0.0
    for at in range(num_requests):
        num_tokens = int(trace.num_shared[at] + trace.num_own[at])
        asked = RequestSummary(names.of(at), num_tokens, True, str(trace.conversation[at]))
        began_s = time.process_time()
        held = router.choose(asked, ())
        spent_s += (time.process_time() - began_s) * (at >= num_requests // 2)
        assert held is not None
        going.append(held)
        if len(going) > OPEN_EACH * num_engines:
            going.popleft().release()
    gc.collect()
    held_bytes = process.memory_info().rss - before
    num_names = sum(len(server.prefixes) for server in router)
    choice_us = 1e6 * spent_s / (num_requests - num_requests // 2)
    return Figures(policy, num_engines, num_requests, round(choice_us, 1), num_names, held_bytes)


def main() -> None:
    """Measure, print, save."""
    parser = command_parser(__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--policies", nargs="+", default=["prefix", "load", "session", "round-robin"])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    policies: Sequence[Routing] = arguments.policies
    found = []
    print("| policy | servers | a choice, us | names | held, MiB |\n|---|---|---|---|---|")
    for policy in policies:
        for num_engines in arguments.engines:
            f = measure(policy, num_engines, arguments.requests)
            found.append(f)
            print(
                f"| {policy} | {num_engines} | {f.choice_us} | {f.names} | {f.held_bytes >> 20} |", flush=True
            )
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), found)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
