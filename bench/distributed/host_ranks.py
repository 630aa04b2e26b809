"""Compare two ranks on one host with two ranks on two hosts, which communicate by encrypted sockets over loopback.

Both hosts are processes of this machine and share its cores with the transfer threads. So neither the latency of a real network
nor the cores of a second host are included. A step has two all-reduces per layer and one for the logits; the table divides the
difference in step time by their number.

    python -m bench.distributed.host_ranks [--shape S] [--repetitions 3] [--save FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.distributed.host_transfer import free_port
from bench.distributed.stages import run_steps
from bench.overhead.run import Machine, _commit, machine
from bench.step import SHAPES, Setup, Steps, config_of
from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import make_worker
from quintet.executor.distributed.hosts.member import MemberSettings
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.worker import Worker
from quintet.process.spans import no_span
from quintet.wire.config import EngineConfig, HostsConfig
from quintet.wire.ids import Role, WorkerId

RANKS = 2
CASES = ((1, 1, 256, 20), (8, 1, 256, 20), (32, 1, 256, 10), (1, 512, 0, 4))
"""Requests, new tokens of each, context tokens of each, and number of steps."""


class Figure(msgspec.Struct, frozen=True):
    """Result of one case."""

    hosts: int
    requests: int
    new: int
    step_ms: float
    """Median."""


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    figures: list[Figure]


@contextlib.contextmanager
def other_host(config: EngineConfig, folder: Path) -> Iterator[EngineConfig]:
    """Start a second host; yield the configuration of the first."""
    key, second_dir = folder / "key", folder / "there"
    key.write_bytes(os.urandom(32))
    second_dir.mkdir()
    hosts = HostsConfig(count=2, address=f"127.0.0.1:{free_port()}", key_file=str(key))
    settings = MemberSettings(
        host=1, hosts=hosts, run_dir=str(second_dir), model_path=config.model.path, packed_cache=None,
        threads=config.executor.threads, log_level="WARNING", available_bytes=1 << 50,
    )  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "quintet.executor.distributed.hosts.member",
        "--parent",
        str(os.getpid()),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as member:
        assert member.stdin is not None
        member.stdin.write(msgspec.json.encode(settings))
        member.stdin.close()
        try:
            yield msgspec.structs.replace(
                config, executor=msgspec.structs.replace(config.executor, hosts=hosts)
            )
        finally:
            member.kill()


def measure(shape: str, hosts: int) -> list[Figure]:
    """Load the model on this number of hosts, and measure each case."""
    setup = Setup(rows=[max(requests for requests, *_ in CASES)], new=512, context=256)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = config_of(folder, SHAPES[shape], setup, RANKS)
        scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=2048)
        config = msgspec.structs.replace(config, scheduler=scheduler)
        if hosts > 1:
            config = stack.enter_context(other_host(config, folder))
        followers = stack.enter_context(closing(FollowerProcesses(WorkerId(Role.EXECUTOR, 0, 1), config)))
        worker = make_worker(take_share(0, config), no_span, followers.memory)
        assert isinstance(worker, Worker)
        while worker.has_idle_tasks:
            worker.run_idle_task()
        figures = []
        for requests, new, context, rounds in CASES:
            worker.reset()
            steps = Steps(requests, context, new, config.model.vocab_size, config.model.max_model_len)
            step_s, _ = run_steps(worker, [steps], rounds, new == 1, lambda: 0.0)
            figures.append(Figure(hosts, requests, new, step_s * 1e3))
    return figures


def main() -> None:
    """Measure one host and two hosts alternately, each in a new process; print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()
    if args.only is not None:
        print(msgspec.json.encode(measure(args.shape, args.only)).decode())
        return
    figures: list[Figure] = []
    command = [sys.executable, "-m", "bench.distributed.host_ranks", "--shape", args.shape, "--only"]
    for _ in range(args.repetitions):
        for hosts in (1, 2):
            printed = subprocess.run([*command, str(hosts)], check=True, capture_output=True, text=True)
            figures += msgspec.json.decode(printed.stdout.splitlines()[-1], type=list[Figure])
    num_all_reduces = 2 * SHAPES[args.shape]["num_hidden_layers"] + 1
    print("| requests x new tokens | one host | two hosts | per all-reduce |\n|---|---|---|---|")
    for requests, new, *_ in CASES:
        one, two = (
            statistics.median(
                each.step_ms
                for each in figures
                if (each.hosts, each.requests, each.new) == (hosts, requests, new)
            )
            for hosts in (1, 2)
        )
        print(
            f"| {requests} x {new} | {one:.1f} ms | {two:.1f} ms | {(two - one) / num_all_reduces:+.2f} ms |"
        )
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), args.shape, figures)
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
