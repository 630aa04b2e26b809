"""Cost and gain of stages on one memory node: one process on all cores, and stages that divide these.

The same requests decode, or are computed for the first time, through both: all of them in each step of the one process, and in as
many groups as there are stages in the steps of the other. A bubble is time in which the first stage does nothing.

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
from bench.step import SHAPES, Room, Steps, config_of
from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import make_worker
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.worker import Worker
from quintet.process.spans import no_span
from quintet.wire.ids import Role, WorkerId

CASES = ((2, 1, 256, 20), (8, 1, 256, 16), (32, 1, 256, 10), (4, 512, 0, 2))
"""Requests, new tokens of each, tokens before them, and how often."""


class Figure(msgspec.Struct, frozen=True):
    """Times of one case."""

    stages: int
    requests: int
    new: int
    round_ms: float
    """Until each request had its new tokens, median."""
    bubble: float | None
    """Share of the time in which the first stage did nothing; None of one process."""


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    threads: int
    figures: list[Figure]


def run(
    worker: StepWorker, groups: list[Steps], rounds: int, advance: bool, seconds: Callable[[], float]
) -> tuple[float, float]:
    """Have every group take its turn so many times; return the median round's seconds, and the share of them computed in."""
    pending: deque[Pending] = deque()
    times, begun, inside = [], time.perf_counter(), seconds()
    first, inside_first = begun, inside
    for turn in range(rounds + 1):
        for steps in groups:
            plan = steps.next(advance and turn > 0)
            while worker.waits_for(plan):
                pending.popleft().result()
            pending.append(worker.begin(plan))
        now = time.perf_counter()
        if turn == 0:  # pages are mapped, caches filled
            first, inside_first = now, seconds()
        else:
            times.append(now - begun)
        begun = now
    wall, inside = time.perf_counter() - first, seconds() - inside_first
    while pending:
        pending.popleft().result()
    return statistics.median(times), inside / wall


def measure(shape: str, stages: int, threads: int) -> list[Figure]:
    """Load the model in so many stages, and measure each case."""
    hf_config, figures = SHAPES[shape], []
    most = max(requests for requests, *_ in CASES)
    room = Room(rows=[most], new=512, context=256, threads=threads // stages)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), hf_config, room, 1)
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
    while worker.has_idle_tasks:  # what a server has behind it after its first idle seconds
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
        round_s, busy = run(worker, groups, rounds, new == 1, seconds)
        figures.append(Figure(stages, requests, new, round_s * 1e3, 1 - busy if stages > 1 else None))
    return figures


def main() -> None:
    """Measure, each number of stages in a process of its own; print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="in all")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if args.only is not None:
        print(msgspec.json.encode(measure(args.shape, args.only, args.threads)).decode())
        return
    figures: list[Figure] = []
    for _ in range(args.repetitions):
        for stages in (1, args.stages):
            words = [
                sys.executable,
                "-m",
                "bench.distributed.stages",
                "--shape",
                args.shape,
                "--threads",
                str(args.threads),
            ]
            printed = subprocess.run(
                [*words, "--only", str(stages)], check=True, capture_output=True, text=True
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
