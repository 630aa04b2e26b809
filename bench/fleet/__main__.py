"""Simulate a fleet of up to a thousand engines in virtual time, with real routers, real cores and simulated executors.

    python -m bench.fleet [--engines 64] [--requests 20000] [--policies prefix load round-robin] [--routers 1] [--grain 16]

Replays a trace (`bench/fleet/traces.py`) with each routing policy: the same requests at the same times. The table has the prefix
cache hits as a share of those of one unbounded cache, the time to first token, and the share of requests with a first token
within ``--within`` seconds. The first quarter of the requests fills the caches and is not counted. docs/scale.md describes the
figures and the effect of coarse steps (``--grain``). The same command prints the same figures on every machine. `python -m
bench.fleet.router_choice` measures the router alone.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from bench.fleet.engine import H100_8B
from bench.fleet.simulation import Failures, Fleet, Outcome, Spread
from bench.fleet.traces import SHAPES, Trace, draw
from bench.overhead.run import Machine, _commit, machine
from bench.routing.simulated_cores import eviction_cost

POLICIES = ("prefix", "load", "round-robin", "session")
LENGTHS_GRAIN = 32
"""Lengths of a trace are multiples of this many tokens, so that all grains replay the same trace."""


class Figures(msgspec.Struct):
    """Results of one trace with one routing policy."""

    shape: str
    engines: int
    routers: int
    spread: str
    policy: str
    rate: float
    requests: int
    grain: int
    seed: int
    deaths: int
    slow: int
    routers_lost: int
    command: str
    hit_rate: float
    """Prefix cache hits as a share of those of one unbounded cache."""
    first_p50_s: float
    first_p90_s: float
    first_p99_s: float
    whole_mean_s: float
    good: float
    """Share of requests with a first token within ``--within`` seconds."""
    num_steps: int
    wall_s: float
    """Duration of the simulation."""
    choosing_us: float
    """CPU time of the routers per request."""
    slowness: float = 4.0
    scarce: int = 0
    scarcity: float = 0.25
    blind: bool = False
    preemptions: int = 0


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    figures: list[Figures]


def figures_of(
    arguments: argparse.Namespace, policy: str, trace: Trace, outcome: Outcome, first: int
) -> Figures:
    """Return the results of the requests from index ``first`` on."""
    ttft_s = np.array(outcome.first_s)[first:] - trace.arrival_s[first:]
    latency_s = np.array(outcome.end_s)[first:] - trace.arrival_s[first:]
    p50, p90, p99 = np.quantile(ttft_s, (0.5, 0.9, 0.99))
    return Figures(
        arguments.shape,
        arguments.engines,
        arguments.routers,
        arguments.spread,
        policy,
        arguments.rate,
        len(trace),
        arguments.grain,
        arguments.seed,
        arguments.deaths,
        arguments.slow,
        arguments.routers_lost,
        shlex.join(["python", "-m", "bench.fleet", *arguments.argv]),
        round(sum(outcome.cached) / max(1, int(trace.ideal()[first:].sum())), 4),
        round(float(p50), 4),
        round(float(p90), 4),
        round(float(p99), 4),
        round(float(latency_s.mean()), 3),
        round(float((ttft_s <= arguments.within).mean()), 4),
        outcome.num_steps,
        round(outcome.wall_s, 1),
        round(1e6 * outcome.choosing_s / len(trace), 1),
        arguments.slowness,
        arguments.scarce,
        arguments.scarcity,
        arguments.blind,
        outcome.num_preemptions,
    )


def simulate(arguments: argparse.Namespace) -> list[Figures]:
    """Replay the trace with each policy; print a table row for each."""
    rate = arguments.rate * arguments.engines
    trace = draw(SHAPES[arguments.shape], arguments.requests, rate, arguments.seed, LENGTHS_GRAIN)
    failures = Failures(
        arguments.deaths,
        arguments.slow,
        arguments.slowness,
        arguments.routers_lost,
        arguments.scarce,
        arguments.scarcity,
    )
    results = []
    print(
        "| policy | hits | TTFT p50, s | p90 | p99 | latency, mean | in time |\n|---|---|---|---|---|---|---|"
    )
    for policy in arguments.policies:
        fleet = Fleet(
            trace, H100_8B, arguments.engines, policy, arguments.grain, arguments.routers, arguments.spread,
            not arguments.least_loaded, failures, arguments.blind,
        )  # fmt: skip
        first = len(trace) // 4
        with eviction_cost(0.0) if arguments.blind else nullcontext():
            f = figures_of(arguments, policy, trace, fleet.run(first), first)
        results.append(f)
        times = f"{f.first_p50_s:.2f} | {f.first_p90_s:.2f} | {f.first_p99_s:.2f} | {f.whole_mean_s:.1f}"
        print(f"| {policy} | {f.hit_rate:.2f} | {times} | {100 * f.good:.1f} % |", flush=True)
    return results


def _add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deaths", type=int, default=0, metavar="N", help="engines that fail, evenly in time"
    )
    parser.add_argument(
        "--slow", type=int, default=0, metavar="N", help="engines with --slowness times the step time"
    )
    parser.add_argument(
        "--slowness", type=float, default=4.0, metavar="X", help="factor of step time (default: 4)"
    )
    parser.add_argument(
        "--scarce", type=int, default=0, metavar="N", help="engines with --scarcity times the KV memory"
    )
    parser.add_argument(
        "--scarcity",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of the other engines' KV memory (default: 0.25)",
    )
    parser.add_argument("--routers-lost", type=int, default=0, metavar="N", help="routers that fail")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="mooncake-tool")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument(
        "--rate", type=float, default=3.4, metavar="R", help="requests a second for each engine"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES[:3], metavar="POLICY")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument(
        "--spread",
        choices=get_args(Spread),
        default="any",
        help="distribution of requests over routers: random, or by a hash of the conversation or of the shared prefix",
    )
    parser.add_argument(
        "--grain",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        default=16,
        help="tokens that the simulation treats as one",
    )
    _add_failure_arguments(parser)
    parser.add_argument(
        "--blind",
        action="store_true",
        help="routers ignore engine speed, KV memory, and evictions by a prompt",
    )
    parser.add_argument(
        "--least-loaded",
        action="store_true",
        help="several routers choose the least loaded engine of the last poll, instead of a random one of those with little load",
    )
    parser.add_argument(
        "--within", type=float, default=2.0, metavar="S", help="target for time to first token, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the results to a JSON file")
    arguments = parser.parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else argv
    return arguments


def save(argv: list[str] | None = None) -> None:
    """Run the simulations of a command line, and append the results to the file of --save."""
    arguments = parse(argv)
    found = simulate(arguments)
    if arguments.save is None:
        return
    if arguments.save.exists():
        report = msgspec.json.decode(arguments.save.read_bytes(), type=Report)
    else:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), [])
    report.figures += found
    arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    gc.disable()  # a thousand cores are millions of objects, which each collection would visit
    save()
