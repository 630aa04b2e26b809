"""Two engines with one load balancer: prefix cache hits, and first-token latency under a skewed load, by routing policy.

    python -m bench.routing.policies [--executor mock|model] [--trace rare] [--policy prefix] [--repetitions 3] [--save FILE]

``shared``: requests of many groups in random order, from eight clients. Each group has a long prefix. The KV memory of one
engine holds little more than half of the prefixes, that of two engines holds all. Hit rates are shares of the ideal, in which
each prefix is computed once.

``rare``: one prompt in 128 is long, and delays the requests after it; ``mixed``: one in eight. Arrivals are Poisson.

Within a repetition, policies alternate. Each has its own server, and the same requests at the same times.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import msgspec

from bench.overhead.run import Machine, _commit, machine
from bench.overhead.server import Server, serve
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.load import Load, Run, run_load

POLICIES = ("round-robin", "load", "prefix", "session")
NUM_ENGINES = 2
KV_BYTES_PER_TOKEN = 2048
"""Of the model that ships with Quintet."""
OUTPUT_LEN = 4
CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of both traces for one executor, in tokens."""

    flags: tuple[str, ...]
    num_groups: int
    requests_per_group: int
    beginning: int
    short: int
    long: int
    rates: dict[str, float]
    """Requests a second of the traces with long prompts, about two thirds of what the engines can do of ``mixed``."""
    duration_s: float


SHAPES = {
    "mock": Shape(
        ("--executor", "mock", "--step-ms", "10", "--max-num-batched-tokens", "128"),
        24, 16, 768, 64, 1900, {"rare": 120.0, "mixed": 56.0}, 60.0,
    ),
    "model": Shape((), 24, 16, 768, 32, 1900, {"rare": 24.0, "mixed": 4.0}, 25.0),
}  # fmt: skip


class Figures(msgspec.Struct):
    """One server."""

    policy: str
    hit_rate: float
    """Of the ideal."""
    first_p50_ms: float
    first_p99_ms: float


class Repetition(msgspec.Struct):
    """All policies in turn."""

    executor: str
    trace: str
    seed: int
    figures: list[Figures]


class Report(msgspec.Struct):
    """The file."""

    date: str
    commit: str
    machine: Machine
    repetitions: list[Repetition] = []


def body(ids: Sequence[int]) -> bytes:
    """Return a request of these tokens."""
    return msgspec.json.encode(
        {"prompt": list(ids), "max_tokens": OUTPUT_LEN, "ignore_eos": True, "temperature": 0, "stream": True}
    )


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return a prompt of no meaning."""
    return [rng.randrange(300, 4000) for _ in range(count)]


def shared(shape: Shape, seed: int) -> list[bytes]:
    """Return the requests of all groups in random order."""
    rng = random.Random(seed)
    beginnings = [tokens(rng, shape.beginning) for _ in range(shape.num_groups)]
    prompts = [[*each, *tokens(rng, 16)] for each in beginnings for _ in range(shape.requests_per_group)]
    rng.shuffle(prompts)
    return [body(prompt) for prompt in prompts]


LONG = {"rare": 1 / 128, "mixed": 1 / 8}
TRACES = ("shared", *LONG)


def sizes(shape: Shape, trace: str, seed: int) -> tuple[list[int], list[float]]:
    """Return the prompts' tokens, and their moments.

    As many are long as the trace says, to one: with a few more of one in 128, the 99th percentile would be one of theirs.
    """
    rng = random.Random(seed)
    at_s, arrivals_s = 0.0, []
    while (at_s := at_s + rng.expovariate(shape.rates[trace])) < shape.duration_s:
        arrivals_s.append(at_s)
    count = len(arrivals_s)
    long = set(rng.sample(range(count), round(count * LONG[trace])))
    return [shape.long if at in long else shape.short for at in range(count)], arrivals_s


def uneven(shape: Shape, trace: str, seed: int) -> tuple[list[bytes], list[float]]:
    """Return requests of two sizes, and their moments."""
    rng = random.Random(seed)
    counts, arrivals_s = sizes(shape, trace, seed)
    return [body(tokens(rng, count)) for count in counts], arrivals_s


def counted(server: Server, name: str) -> float:
    """Return a counter of the server, over all its series."""
    text = ask(server.target, "GET", "/metrics").body.decode()
    return sum(
        float(value) for value in re.findall(rf"^quintet:{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    )


def figures_of(policy: str, run: Run, hit_rate: float) -> Figures:
    """Read the times of first tokens, from when each request was due."""
    failed = [outcome.message for outcome in run.outcomes if outcome.failure is not None]
    assert not failed, failed[:3]
    first_ms = [1e3 * ((outcome.tally.first_s or outcome.end_s) - outcome.due_s) for outcome in run.outcomes]
    return Figures(
        policy, round(hit_rate, 4), round(median(first_ms), 2), round(quantiles(first_ms, n=100)[98], 2)
    )


def measure(executor: str, trace: str, policy: str, seed: int) -> Figures:
    """Play one trace to one server."""
    shape = SHAPES[executor]
    flags = [*shape.flags, "--data-parallel-size", str(NUM_ENGINES), "--routing", policy]
    if trace == "shared":
        held = int(shape.beginning * shape.num_groups * 0.55) + CLIENTS * 64
        flags += ["--kv-cache-memory", str(held * KV_BYTES_PER_TOKEN), "--max-model-len", "1024"]
    with serve(None, flags) as server:
        run_load(Load(server.target, "/v1/completions", [body(range(300, 330))] * 8, CLIENTS))
        before = counted(server, "prompt_tokens_cached")
        if trace == "shared":
            run = run_load(Load(server.target, "/v1/completions", shared(shape, seed), CLIENTS))
            ideal = shape.num_groups * (shape.requests_per_group - 1) * shape.beginning
            return figures_of(policy, run, (counted(server, "prompt_tokens_cached") - before) / ideal)
        bodies, arrivals_s = uneven(shape, trace, seed)
        run = run_load(Load(server.target, "/v1/completions", bodies, arrivals_s=arrivals_s))
        return figures_of(policy, run, 0.0)


def repeat(executor: str, trace: str, seed: int, policies: Sequence[str]) -> Repetition:
    """Play a trace to these policies, in an order that changes from repetition to repetition."""
    turn = seed % len(policies)
    found = []
    for policy in (*policies[turn:], *policies[:turn]):
        found.append(measure(executor, trace, policy, seed))
        print(f"{executor:>6} {trace:>7} {found[-1]}", flush=True)
    return Repetition(executor, trace, seed, found)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=list(SHAPES), default="mock")
    parser.add_argument("--trace", choices=TRACES, action="append")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the figures as JSON")
    arguments = parser.parse_args()
    policies = arguments.policy or POLICIES
    done = [
        repeat(arguments.executor, trace, seed, policies)
        for seed in range(arguments.seed, arguments.seed + arguments.repetitions)
        for trace in arguments.trace or TRACES
    ]
    for trace in arguments.trace or TRACES:
        print(f"\n| {trace} | hit rate | first token p50, ms | p99, ms |\n|---|---|---|---|")
        for policy in policies:
            rows = [f for each in done if each.trace == trace for f in each.figures if f.policy == policy]
            values = [
                median(getattr(row, name) for row in rows)
                for name in ("hit_rate", "first_p50_ms", "first_p99_ms")
            ]
            print(f"| {policy} | {values[0]:.2f} | {values[1]:.0f} | {values[2]:.0f} |")
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine())
        if arguments.save.exists():
            report = msgspec.json.decode(arguments.save.read_bytes(), type=Report)
        report.repetitions += done
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
