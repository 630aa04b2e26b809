"""Goodput at three times the capacity: requests finished within their deadline, with prediction and without.

    python -m bench.chaos.overload [--executor mock|embedded] [--repetitions 1] [--out FILE]

In each repetition, three servers, one after another, get the same requests at the same random times:

* ``predicted``: requests have a deadline; the core rejects at once those that it predicts to miss it.
* ``told``: requests have a deadline, and none is rejected; those that reach it are ended. First come, first served.
* ``untold``: requests have no deadline. First come, first served. A response after the deadline counts as late.

Capacity and latency are measured first, with one client for each slot. The load is three times that capacity, the deadline three
times that latency. Results are appended to the file.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.chaos.streams import WORDS
from bench.overhead.run import Machine, machine
from bench.overhead.server import Server, serve
from quintet.deploy.tools.load_client.load import Load, Outcome, Run, run_load

SLOTS = 16
INPUT_WORDS, OUTPUT_LEN = 24, 64
EXCESS = 3.0
"""Ratio of the arrival rate to capacity."""
DEADLINE_RATIO = 3.0
"""Ratio of the deadline to the latency at capacity."""
FLAGS = {
    "mock": ["--executor", "mock", "--step-ms", "10"],
    "embedded": ["--kv-cache-memory", "64MiB", "--max-model-len", "512"],
}
VARIANTS = {"predicted": (True, ()), "told": (True, ("--no-deadline-admission",)), "untold": (False, ())}
"""Name -> whether requests have a deadline, and flags of the server."""


class Figures(msgspec.Struct):
    """One server under overload."""

    variant: str
    num_sent: int
    num_good: int
    """Finished by their deadline."""
    num_late: int
    """Finished after it."""
    num_refused: int
    """429."""
    num_expired: int
    """504, before or in the stream."""
    num_other: int
    good_per_s: float
    refused_after_ms: list[float]
    """Median and maximum time to a 429 response."""


class Repetition(msgspec.Struct):
    """Results of the three servers of one repetition."""

    executor: str
    seed: int
    capacity_per_s: float
    answer_s: float
    deadline_s: float
    duration_s: float
    figures: list[Figures]


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    machine: Machine
    slots: int
    output_len: int
    repetitions: list[Repetition] = []


def bodies(count: int, seed: int, deadline_s: float | None) -> list[bytes]:
    """Return request bodies with different prompts of equal length."""
    rng = random.Random(seed)
    fields: dict[str, object] = {
        "max_tokens": OUTPUT_LEN,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    if deadline_s is not None:
        fields["timeout"] = deadline_s
    return [
        msgspec.json.encode({"prompt": " ".join(rng.choices(WORDS, k=INPUT_WORDS)), **fields})
        for _ in range(count)
    ]


def measure_capacity(server: Server, seed: int) -> tuple[float, float]:
    """Return requests per second and the median latency in seconds, with one client for each slot."""
    run_load(Load(server.target, "/v1/completions", bodies(SLOTS, seed, None), SLOTS))  # warm-up
    load = Load(server.target, "/v1/completions", bodies(4 * SLOTS, seed + 1, None), SLOTS)
    run = run_load(load)
    failed = [outcome.message for outcome in run.outcomes if outcome.failure is not None]
    assert not failed, failed
    times_s = [outcome.end_s - outcome.start_s for outcome in run.outcomes]
    return len(run.outcomes) / (run.end_s - run.start_s), median(times_s)


def overload(
    server: Server, has_deadline: bool, arrivals_s: Sequence[float], deadline_s: float, seed: int
) -> Run:
    """Send the requests at their arrival times and wait for the last response."""
    fields = bodies(len(arrivals_s), seed, deadline_s if has_deadline else None)
    return run_load(Load(server.target, "/v1/completions", fields, arrivals_s=arrivals_s))


def figures_of(variant: str, run: Run, deadline_s: float, duration_s: float) -> Figures:
    """Count the requests by ending."""
    kinds = {"good": 0, "late": 0, "refused": 0, "expired": 0, "other": 0}
    refused_ms: list[float] = []
    for outcome in run.outcomes:
        kind = _ending(outcome, deadline_s)
        kinds[kind] += 1
        if kind == "refused":
            refused_ms.append(1e3 * (outcome.end_s - outcome.start_s))
    return Figures(
        variant,
        len(run.outcomes),
        kinds["good"],
        kinds["late"],
        kinds["refused"],
        kinds["expired"],
        kinds["other"],
        round(kinds["good"] / duration_s, 2),
        [round(median(refused_ms), 2), round(max(refused_ms), 2)] if refused_ms else [],
    )


def _ending(outcome: Outcome, deadline_s: float) -> str:
    if outcome.failure is None:
        return "good" if outcome.end_s - outcome.due_s <= deadline_s else "late"
    if outcome.failure == "HTTP 429":
        return "refused"
    if outcome.failure == "HTTP 504" or "did not end within" in outcome.message:
        return "expired"
    return "other"


def repeat(executor: str, seed: int, duration_s: float) -> Repetition:
    """Run the variants, in a different order for each seed."""
    names = list(VARIANTS)
    names = names[seed % 3 :] + names[: seed % 3]
    capacity, answer_s, deadline_s = 0.0, 0.0, 0.0
    arrivals_s: list[float] = []
    figures: list[Figures] = []
    for name in names:
        has_deadline, flags = VARIANTS[name]
        with serve(None, ["--max-num-seqs", str(SLOTS), *FLAGS[executor], *flags]) as server:
            measured, measured_s = measure_capacity(server, seed)
            if not arrivals_s:
                capacity, answer_s, deadline_s = measured, measured_s, DEADLINE_RATIO * measured_s
                rng, at_s = random.Random(seed), 0.0
                while (at_s := at_s + rng.expovariate(EXCESS * capacity)) < duration_s:
                    arrivals_s.append(at_s)
            run = overload(server, has_deadline, arrivals_s, deadline_s, seed + 2)
        figures.append(figures_of(name, run, deadline_s, duration_s))
        print(f"{executor:>9} {figures[-1]}", flush=True)
    return Repetition(
        executor, seed, round(capacity, 2), round(answer_s, 3), round(deadline_s, 3), duration_s, figures
    )


def main() -> None:
    """Run, print and append."""
    parser = command_parser(__doc__)
    parser.add_argument("--executor", choices=list(FLAGS), default="mock")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first repetition")
    parser.add_argument("--duration", type=float, default=12.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help="JSON file to append the results to (default: none)")
    arguments = parser.parse_args()
    done = [
        repeat(arguments.executor, arguments.seed + index, arguments.duration)
        for index in range(arguments.repetitions)
    ]
    if arguments.out is None:
        return
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = Report(date, machine(), SLOTS, OUTPUT_LEN)
    if arguments.out.exists():
        report = msgspec.json.decode(arguments.out.read_bytes(), type=Report)
    report.repetitions += done
    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
