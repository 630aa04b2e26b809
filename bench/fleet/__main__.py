"""A fleet of up to a thousand engines in virtual time: the real router's choices, the real cores, executors that only take time.

    python -m bench.fleet [--engines 64] [--requests 20000] [--policies prefix load round-robin] [--routers 1] [--grain 16]

Plays a trace in the shape of a published one (`bench/fleet/traces.py`) once for each policy, the same requests at the same
moments, and prints: the share found of what one unbounded cache would find, the time to the first token, and how many requests
had theirs within ``--within`` seconds. Prompts of the first quarter fill the caches and are not counted. What each figure means,
and what coarse steps (``--grain``) change, is in docs/scale.md. Nothing is timed but the simulation itself: the same command
prints the same figures everywhere. `python -m bench.fleet.choosing` measures the router by itself.
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
from bench.fleet.play import Fleet, Outcome, Spread, Troubles
from bench.fleet.traces import SHAPES, Trace, draw
from bench.overhead.run import Machine, _commit, machine
from bench.routing.simulated_cores import counting

POLICIES = ("prefix", "load", "round-robin", "session")
LENGTHS_GRAIN = 32
"""Lengths of a trace are multiples of so many tokens, so that every grain up to that plays the same trace."""


class Figures(msgspec.Struct):
    """One trace played to one fleet."""

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
    """Of what one unbounded cache would find."""
    first_p50_s: float
    first_p90_s: float
    first_p99_s: float
    whole_mean_s: float
    good: float
    """Share of requests with the first token in time."""
    num_steps: int
    wall_s: float
    """Of the simulation."""
    choosing_us: float
    """Of the processor, a request."""
    slowness: float = 4.0
    scarce: int = 0
    scarcity: float = 0.25
    blind: bool = False
    preemptions: int = 0


class Report(msgspec.Struct):
    """The file."""

    date: str
    commit: str
    machine: Machine
    figures: list[Figures]


def figures_of(
    arguments: argparse.Namespace, policy: str, trace: Trace, outcome: Outcome, first: int
) -> Figures:
    """Return what came of the requests from ``first`` on."""
    first_s = np.array(outcome.first_s)[first:] - trace.arrival_s[first:]
    whole_s = np.array(outcome.end_s)[first:] - trace.arrival_s[first:]
    p50, p90, p99 = np.quantile(first_s, (0.5, 0.9, 0.99))
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
        shlex.join(["python", "-m", "bench.fleet", *arguments.words]),
        round(sum(outcome.cached) / max(1, int(trace.ideal()[first:].sum())), 4),
        round(float(p50), 4),
        round(float(p90), 4),
        round(float(p99), 4),
        round(float(whole_s.mean()), 3),
        round(float((first_s <= arguments.within).mean()), 4),
        outcome.num_steps,
        round(outcome.wall_s, 1),
        round(1e6 * outcome.choosing_s / len(trace), 1),
        arguments.slowness,
        arguments.scarce,
        arguments.scarcity,
        arguments.blind,
        outcome.num_preemptions,
    )


def play(arguments: argparse.Namespace) -> list[Figures]:
    """Play the trace to every policy, printing a row for each."""
    rate = arguments.rate * arguments.engines
    trace = draw(SHAPES[arguments.shape], arguments.requests, rate, arguments.seed, LENGTHS_GRAIN)
    troubles = Troubles(
        arguments.deaths,
        arguments.slow,
        arguments.slowness,
        arguments.routers_lost,
        arguments.scarce,
        arguments.scarcity,
    )
    found = []
    print(
        "| policy | found | first token p50, s | p90 | p99 | whole, mean | in time |\n|---|---|---|---|---|---|---|"
    )
    for policy in arguments.policies:
        fleet = Fleet(
            trace, H100_8B, arguments.engines, policy, arguments.grain, arguments.routers, arguments.spread,
            not arguments.least_loaded, troubles, arguments.blind,
        )  # fmt: skip
        first = len(trace) // 4
        with counting(0.0) if arguments.blind else nullcontext():
            f = figures_of(arguments, policy, trace, fleet.play(first), first)
        found.append(f)
        times = f"{f.first_p50_s:.2f} | {f.first_p90_s:.2f} | {f.first_p99_s:.2f} | {f.whole_mean_s:.1f}"
        print(f"| {policy} | {f.hit_rate:.2f} | {times} | {100 * f.good:.1f} % |", flush=True)
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
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
        "--spread", choices=get_args(Spread), default="any", help="which router a request comes to"
    )
    parser.add_argument(
        "--grain", type=int, choices=(1, 2, 4, 8, 16, 32), default=16, help="tokens that stand for one"
    )
    parser.add_argument("--deaths", type=int, default=0, metavar="N", help="engines that die, evenly in time")
    parser.add_argument(
        "--slow", type=int, default=0, metavar="N", help="engines that take --slowness as long"
    )
    parser.add_argument("--slowness", type=float, default=4.0, metavar="X", help="times as long (4)")
    parser.add_argument(
        "--scarce", type=int, default=0, metavar="N", help="engines with --scarcity of KV memory"
    )
    parser.add_argument(
        "--scarcity", type=float, default=0.25, metavar="SHARE", help="of what others have (0.25)"
    )
    parser.add_argument(
        "--blind",
        action="store_true",
        help="have routers know nothing of paces, of KV memory, and of what a prompt displaces there",
    )
    parser.add_argument("--routers-lost", type=int, default=0, metavar="N")
    parser.add_argument(
        "--least-loaded",
        action="store_true",
        help="have routers that are not alone take the least loaded of all by what they last heard, instead of drawing",
    )
    parser.add_argument(
        "--within", type=float, default=2.0, metavar="S", help="what is in time for a first token"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the figures as JSON")
    arguments = parser.parse_args(words)
    arguments.words = sys.argv[1:] if words is None else words
    return arguments


def save(words: list[str] | None = None) -> None:
    """Play what a command line says, and append the figures to its file, if it names one."""
    arguments = parse(words)
    found = play(arguments)
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
    gc.disable()  # a thousand cores are millions of objects, and the search for cycles looks at them again and again
    save()
