"""Compare routing policies on two engines: prefix cache hits, and time to first token beside long prompts.

    python -m bench.routing.policies [--executor mock|model] [--trace rare] [--policy prefix] [--repetitions 3] [--save FILE]

``shared_prefix_requests``: requests of many groups in random order, from eight clients. Each group has a long prefix. The KV
memory of one engine holds little more than half of the prefixes, that of two engines holds all. Hit rates are shares of the
ideal, in which each prefix is computed once.

``rare``: one prompt in 128 is long, and delays the requests after it; ``mixed``: one in eight. Arrivals are Poisson.

Within a repetition, policies alternate. Each policy has its own server, which gets the same requests at the same times.
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
"""KV size of the embedded model."""
OUTPUT_LEN = 4
CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of all traces for one executor; lengths in tokens."""

    flags: tuple[str, ...]
    num_groups: int
    requests_per_group: int
    prefix: int
    short: int
    long: int
    rates: dict[str, float]
    """Requests per second of the traces with long prompts: for ``mixed``, about two thirds of the engines' capacity."""
    duration_s: float


SHAPES = {
    "mock": Shape(
        ("--executor", "mock", "--step-ms", "10", "--max-num-batched-tokens", "128"),
        24, 16, 768, 64, 1900, {"rare": 120.0, "mixed": 56.0}, 60.0,
    ),
    "model": Shape((), 24, 16, 768, 32, 1900, {"rare": 24.0, "mixed": 4.0}, 25.0),
}  # fmt: skip


class Figures(msgspec.Struct):
    """Results of one policy."""

    policy: str
    hit_rate: float
    """Share of the ideal hit rate."""
    first_p50_ms: float
    first_p99_ms: float


class Repetition(msgspec.Struct):
    """Results of all policies for one trace and seed."""

    executor: str
    trace: str
    seed: int
    figures: list[Figures]


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    repetitions: list[Repetition] = []


def body(ids: Sequence[int]) -> bytes:
    """Return the body of a completion request with these token ids."""
    return msgspec.json.encode(
        {"prompt": list(ids), "max_tokens": OUTPUT_LEN, "ignore_eos": True, "temperature": 0, "stream": True}
    )


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(300, 4000) for _ in range(count)]


def shared_prefix_requests(shape: Shape, seed: int) -> list[bytes]:
    """Return the bodies of the ``shared_prefix_requests`` trace: requests of all groups in random order."""
    rng = random.Random(seed)
    prefixes = [random_tokens(rng, shape.prefix) for _ in range(shape.num_groups)]
    prompts = [[*each, *random_tokens(rng, 16)] for each in prefixes for _ in range(shape.requests_per_group)]
    rng.shuffle(prompts)
    return [body(prompt) for prompt in prompts]


LONG_SHARES = {"rare": 1 / 128, "mixed": 1 / 8}
TRACES = ("shared", *LONG_SHARES)


def draw_lengths(shape: Shape, trace: str, seed: int) -> tuple[list[int], list[float]]:
    """Return the prompt lengths of a trace and the arrival times in seconds.

    The number of long prompts is exact, not random: with more than one in 100, the 99th percentile would be that of a long
    prompt.
    """
    rng = random.Random(seed)
    at_s, arrivals_s = 0.0, []
    while (at_s := at_s + rng.expovariate(shape.rates[trace])) < shape.duration_s:
        arrivals_s.append(at_s)
    count = len(arrivals_s)
    long = set(rng.sample(range(count), round(count * LONG_SHARES[trace])))
    return [shape.long if at in long else shape.short for at in range(count)], arrivals_s


def long_prompt_requests(shape: Shape, trace: str, seed: int) -> tuple[list[bytes], list[float]]:
    """Return the bodies of a trace with long prompts, and the arrival times in seconds."""
    rng = random.Random(seed)
    counts, arrivals_s = draw_lengths(shape, trace, seed)
    return [body(random_tokens(rng, count)) for count in counts], arrivals_s


def read_counter(server: Server, name: str) -> float:
    """Return a counter of the server, summed over its series."""
    text = ask(server.target, "GET", "/metrics").body.decode()
    return sum(
        float(value) for value in re.findall(rf"^quintet:{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    )


def figures_of(policy: str, run: Run, hit_rate: float) -> Figures:
    """Return the results of a run. Times to first token count from each request's arrival time."""
    failed = [outcome.message for outcome in run.outcomes if outcome.failure is not None]
    assert not failed, failed[:3]
    first_ms = [1e3 * ((outcome.tally.first_s or outcome.end_s) - outcome.due_s) for outcome in run.outcomes]
    return Figures(
        policy, round(hit_rate, 4), round(median(first_ms), 2), round(quantiles(first_ms, n=100)[98], 2)
    )


def measure(executor: str, trace: str, policy: str, seed: int) -> Figures:
    """Send one trace to a server with one policy."""
    shape = SHAPES[executor]
    flags = [*shape.flags, "--data-parallel-size", str(NUM_ENGINES), "--routing", policy]
    if trace == "shared":
        kv_tokens = int(shape.prefix * shape.num_groups * 0.55) + CLIENTS * 64
        flags += ["--kv-cache-memory", str(kv_tokens * KV_BYTES_PER_TOKEN), "--max-model-len", "1024"]
    with serve(None, flags) as server:
        run_load(Load(server.target, "/v1/completions", [body(range(300, 330))] * 8, CLIENTS))
        before = read_counter(server, "prompt_tokens_cached")
        if trace == "shared":
            run = run_load(
                Load(server.target, "/v1/completions", shared_prefix_requests(shape, seed), CLIENTS)
            )
            ideal = shape.num_groups * (shape.requests_per_group - 1) * shape.prefix
            return figures_of(policy, run, (read_counter(server, "prompt_tokens_cached") - before) / ideal)
        bodies, arrivals_s = long_prompt_requests(shape, trace, seed)
        run = run_load(Load(server.target, "/v1/completions", bodies, arrivals_s=arrivals_s))
        return figures_of(policy, run, 0.0)


def repeat(executor: str, trace: str, seed: int, policies: Sequence[str]) -> Repetition:
    """Measure a trace with each policy, in a different order for each seed."""
    first = seed % len(policies)
    results = []
    for policy in (*policies[first:], *policies[:first]):
        results.append(measure(executor, trace, policy, seed))
        print(f"{executor:>6} {trace:>7} {results[-1]}", flush=True)
    return Repetition(executor, trace, seed, results)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=list(SHAPES), default="mock")
    parser.add_argument("--trace", choices=TRACES, action="append")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first repetition")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the results to a JSON file")
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
