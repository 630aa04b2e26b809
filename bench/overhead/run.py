"""Measure the overhead of all components except the model: HTTP, tokenization, scheduling, messages.

    (a) the mock executor with 0 ms per step, 1, 64 and 256 streams
    (b) the null model (bench/null_model.py) on the real executor, 64 and 256 streams

Requests have 32 prompt tokens and 128 output tokens, greedy and streamed, over /v1/completions. Client and server share the
machine. Each point is run three times. Prints medians, with CPU time by process for each point. Raw results go to bench/results/.

    python -m bench.overhead.run            about three minutes
    python -m bench.overhead.run --quick    one short repetition of each point
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

import msgspec
import psutil

from bench.arguments import command_parser
from bench.null_model import make_null_model
from bench.overhead.server import Server, serve
from quintet.deploy.cli.bench import measured, words_per_token
from quintet.deploy.tools.load_client.load import Load
from quintet.deploy.tools.load_client.report import Summary
from quintet.deploy.tools.load_client.workload import PromptSpec, RequestShape, random_prompts

INPUT_LEN, OUTPUT_LEN = 32, 128
PACKAGES = ("quintet", "torch", "transformers", "pyzmq", "msgspec", "uvloop", "starlette", "uvicorn")
METRICS_DELAY_S = 2.5
"""Wait before histograms are read; processes send them about once a second."""


@dataclass(frozen=True, slots=True)
class Point:
    """Executor and load of one row of the table."""

    case: str
    streams: int
    waves: int
    """Requests per stream in one repetition."""
    flags: tuple[str, ...]


MOCK = ("--executor", "mock", "--step-ms", "0")
POINTS = (
    Point("a: mock executor", 1, 100, MOCK),
    Point("a: mock executor", 64, 24, MOCK),
    Point("a: mock executor", 256, 12, MOCK),
    Point("b: null model", 64, 6, ()),
    Point("b: null model", 256, 4, ()),
)


class Repetition(msgspec.Struct):
    """Results of one run of a point."""

    summary: Summary
    cpu_seconds: dict[str, float]
    """CPU time by role, and of the ``client``."""
    core_steps: float
    core_plan_ms: float
    """Mean time per step."""
    core_commit_ms: float


class PointResult(msgspec.Struct):
    """Results of all runs of a point."""

    case: str
    streams: int
    requests: int
    repetitions: list[Repetition]


class Machine(msgspec.Struct):
    """Machine of the measurement."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    versions: dict[str, str]
    input_len: int
    output_len: int
    points: list[PointResult]


def repeat(server: Server, point: Point, requests: int, seed: int) -> Repetition:
    """Run one repetition and measure the CPU time of all processes."""
    model = "null"
    spec = PromptSpec(requests, INPUT_LEN, words_per_token=words_per_token(server.target, model), seed=seed)
    shape = RequestShape("/v1/completions", model, OUTPUT_LEN, ignore_eos=True)
    bodies = [shape.body(item) for item in random_prompts(spec)]
    plan_before, commit_before = (
        server.histogram("core_plan_seconds"),
        server.histogram("core_commit_seconds"),
    )
    cpu_before, client_before_s = server.cpu_seconds(), time.process_time()
    summary = measured(Load(server.target, shape.endpoint, bodies, point.streams), progress=False)
    client_s, cpu_after = time.process_time() - client_before_s, server.cpu_seconds()
    if summary.num_completed != requests:
        raise RuntimeError(
            f"only {summary.num_completed} of {requests} requests completed: {summary.failures}"
        )
    time.sleep(METRICS_DELAY_S)
    plan_s, steps = _since(server.histogram("core_plan_seconds"), plan_before)
    commit_s, commits = _since(server.histogram("core_commit_seconds"), commit_before)
    return Repetition(
        summary,
        {role: round(cpu_after[role] - cpu_before.get(role, 0.0), 3) for role in cpu_after}
        | {"client": round(client_s, 3)},
        steps,
        round(1e3 * plan_s / max(1.0, steps), 4),
        round(1e3 * commit_s / max(1.0, commits), 4),
    )


def _since(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def run_point(model: Path, point: Point, repetitions: int, waves: int) -> PointResult:
    """Start a server for a point and run all repetitions."""
    requests = point.streams * waves
    with serve(model, ["--served-model-name", "null", "--max-num-seqs", "256", *point.flags]) as server:
        repeat(server, point, min(requests, 2 * point.streams + 8), seed=1000)  # warm-up: not kept
        results = [repeat(server, point, requests, seed) for seed in range(repetitions)]
    return PointResult(point.case, point.streams, requests, results)


def describe(result: PointResult) -> str:
    """Return the medians of a point and its CPU time by role, as text."""
    runs = result.repetitions

    def median_of(values: list[float]) -> float:
        return median(values)

    rate = median_of([r.summary.output_tokens_per_s for r in runs])
    ttft = median_of([r.summary.ttft_ms.p50 if r.summary.ttft_ms else float("nan") for r in runs])
    ttft99 = median_of([r.summary.ttft_ms.p99 if r.summary.ttft_ms else float("nan") for r in runs])
    lines = [
        f"{result.case}, {result.streams} streams: {rate:,.0f} tokens/s, time to first token p50 {ttft:.2f} ms, "
        f"p99 {ttft99:.2f} ms; core plan {median_of([r.core_plan_ms for r in runs]):.3f} + commit "
        f"{median_of([r.core_commit_ms for r in runs]):.3f} ms per step"
    ]
    for role in sorted(runs[0].cpu_seconds, key=lambda role: -runs[0].cpu_seconds[role]):
        per_token_us = median_of([1e6 * r.cpu_seconds[role] / r.summary.output_tokens for r in runs])
        share = median_of([100 * r.cpu_seconds[role] / r.summary.duration_s for r in runs])
        lines.append(f"    {role:<12} {per_token_us:8.2f} us/token {share:6.1f} % of one core")
    return "\n".join(lines)


def machine() -> Machine:
    """Return a description of this machine."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0))
    return Machine(cpu, cores, psutil.virtual_memory().total, platform.system(), platform.python_version())


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "unknown"


def _versions(packages: tuple[str, ...] = PACKAGES) -> Mapping[str, str]:
    return {name: metadata.version(name) for name in packages}


def main() -> None:
    """Run all points, print the table, write the raw results."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="run one short repetition of each point, write no file"
    )
    parser.add_argument("--only", choices=("a", "b"), help="run only this case")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/overhead-<date>.json)")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="null-model-") as folder:
        model = make_null_model(Path(folder))
        for point in POINTS:
            if arguments.only is None or point.case.startswith(arguments.only):
                waves = max(1, point.waves // 4) if arguments.quick else point.waves
                results.append(run_point(model, point, 1 if arguments.quick else 3, waves))
                print(describe(results[-1]), flush=True)
    if arguments.quick and arguments.out is None:
        return
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = Report(date, _commit(), machine(), dict(_versions()), INPUT_LEN, OUTPUT_LEN, results)
    out = arguments.out or Path(__file__).parents[1] / "results" / f"overhead-{date}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
