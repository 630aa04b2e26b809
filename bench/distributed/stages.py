"""Compare one process on all cores with pipeline stages that share these cores, on one NUMA node.

Both decode or prefill the same requests. One process computes all requests in each step; the pipeline divides them into as many
groups as stages. A bubble is time in which the first stage is idle.

    python -m bench.distributed.stages --shape S --stages 2 [--save FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from bench.step import SHAPES, Setup, Steps, config_of
from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import make_worker
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.worker import Worker
from quintet.process.spans import no_span
from quintet.wire.ids import Role, WorkerId

CASES = ((2, 1, 256, 20), (8, 1, 256, 16), (32, 1, 256, 10), (4, 512, 0, 2))
"""Requests, new tokens of each, context tokens of each, and number of rounds."""


class Figure(msgspec.Struct, frozen=True):
    """Result of one case."""

    stages: int
    requests: int
    new: int
    round_ms: float
    """Median time until each request has its new tokens."""
    bubble: float | None
    """Share of the time in which the first stage is idle; None with one process."""


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    threads: int
    figures: list[Figure]


def run_steps(
    worker: StepWorker, groups: list[Steps], rounds: int, advance: bool, seconds: Callable[[], float]
) -> tuple[float, float]:
    """Run ``rounds`` steps of every group; return the median round in seconds, and the share of time spent computing.

    seconds: returns the total computing time of the worker so far.
    """
    pending: deque[Pending] = deque()
    times, begin_s, compute_s = [], time.perf_counter(), seconds()
    first_s, first_compute_s = begin_s, compute_s
    for round_index in range(rounds + 1):
        for steps in groups:
            plan = steps.next(advance and round_index > 0)
            while worker.waits_for(plan):
                pending.popleft().result()
            pending.append(worker.begin(plan))
        now = time.perf_counter()
        if round_index == 0:  # the warm-up
            first_s, first_compute_s = now, seconds()
        else:
            times.append(now - begin_s)
        begin_s = now
    wall, compute_s = time.perf_counter() - first_s, seconds() - first_compute_s
    while pending:
        pending.popleft().result()
    return statistics.median(times), compute_s / wall


def measure(shape: str, stages: int, threads: int) -> list[Figure]:
    """Load the model in this number of stages, and measure each case."""
    hf_config, figures = SHAPES[shape], []
    max_requests = max(requests for requests, *_ in CASES)
    setup = Setup(rows=[max_requests], new=512, context=256, threads=threads // stages)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), hf_config, setup, 1)
        scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=2048)
        executor = msgspec.structs.replace(config.executor, pipeline_parallel_size=stages)
        config = msgspec.structs.replace(config, scheduler=scheduler, executor=executor)
        worker: StepWorker
        if stages == 1:
            return _figures(make_worker(config), stages, config.model.vocab_size, config.model.max_model_len)
        with closing(FollowerProcesses(WorkerId(Role.EXECUTOR, 0, 1), config)) as followers:
            worker = make_worker(take_share(0, config), no_span, followers.memory)
            figures = _figures(worker, stages, config.model.vocab_size, config.model.max_model_len)
    return figures


def _figures(worker: StepWorker, stages: int, vocab_size: int, length: int) -> list[Figure]:
    assert isinstance(worker, Worker | PipelineWorker)
    while worker.has_idle_tasks:  # a server runs these in its first idle seconds
        worker.run_idle_task()
    figures = []
    for requests, new, context, rounds in CASES:
        worker.reset()
        num_groups = requests if new > 1 else min(stages, requests)
        each = requests // num_groups
        groups = [
            Steps(each, context, new, vocab_size, length, first=each * group) for group in range(num_groups)
        ]
        seconds = (lambda: worker.seconds) if isinstance(worker, PipelineWorker) else (lambda: 0.0)
        round_s, busy = run_steps(worker, groups, rounds, new == 1, seconds)
        figures.append(Figure(stages, requests, new, round_s * 1e3, 1 - busy if stages > 1 else None))
    return figures


def main() -> None:
    """Measure one process and the pipeline, each in a new process; print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="number of threads of all stages together")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()
    if args.only is not None:
        print(msgspec.json.encode(measure(args.shape, args.only, args.threads)).decode())
        return
    figures: list[Figure] = []
    for _ in range(args.repetitions):
        for stages in (1, args.stages):
            command = [
                sys.executable,
                "-m",
                "bench.distributed.stages",
                "--shape",
                args.shape,
                "--threads",
                str(args.threads),
            ]
            printed = subprocess.run(
                [*command, "--only", str(stages)], check=True, capture_output=True, text=True
            )
            figures += msgspec.convert(json.loads(printed.stdout.splitlines()[-1]), list[Figure])
    print(f"| requests x new tokens | one process | {args.stages} stages | | bubble |\n|---|---|---|---|---|")
    for requests, new, *_ in CASES:
        both = [each for each in figures if (each.requests, each.new) == (requests, new)]
        one, many = (
            statistics.median(each.round_ms for each in both if (each.stages == 1) is is_one)
            for is_one in (True, False)
        )
        bubble = statistics.median(each.bubble for each in both if each.bubble is not None)
        print(f"| {requests} x {new} | {one:.1f} ms | {many:.1f} ms | {many / one - 1:+.0%} | {bubble:.0%} |")
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), args.shape, args.threads, figures)
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
