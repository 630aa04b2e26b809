"""Compare the overhead of this checkout with that of another one, in pairs of alternating runs.

For each point of `bench.overhead.run`, both servers run at once and get loads in turn: this, that, that, this, … Prints medians
of throughput and CPU time per token, and of the ratios of each pair. CPU time hardly depends on other load on the machine.

    python -m bench.overhead.pairs FOLDER [--only a] [--rounds 6]    FOLDER: another built checkout
    python -m bench.overhead.pairs FOLDER --only a --streams 15 --waves 8 --output-len 256    another point
"""

from __future__ import annotations

import dataclasses
import datetime
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.null_model import make_null_model
from bench.overhead.run import INPUT_LEN, OUTPUT_LEN, POINTS, Machine, Point, machine
from bench.overhead.server import Server, serve
from quintet.deploy.cli.bench import measured, words_per_token
from quintet.deploy.tools.load_client.load import Load
from quintet.deploy.tools.load_client.workload import PromptSpec, RequestShape, random_prompts

THIS = Path(__file__).parents[2]


class Run(msgspec.Struct):
    """Results of one load on one server."""

    tokens_per_s: float
    cpu_us_per_token: dict[str, float]
    """CPU time of the server's processes, by role."""

    @property
    def cpu_us(self) -> float:
        """CPU time per token of all roles."""
        return sum(self.cpu_us_per_token.values())


class PairsOfPoint(msgspec.Struct):
    """Results of all pairs of a point, in order."""

    case: str
    streams: int
    output_len: int
    this: list[Run]
    that: list[Run]

    @property
    def ratios(self) -> list[float]:
        """Throughput of this checkout divided by that of the other one, for each pair."""
        return [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.this, self.that, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """CPU time per token of this checkout divided by that of the other one, for each pair."""
        return [a.cpu_us / b.cpu_us for a, b in zip(self.this, self.that, strict=True)]

    def text(self) -> str:
        """Return the medians and ratios as text."""
        lines = [f"{self.case}, {self.streams} streams, {self.output_len} tokens out"]
        for name, runs in (("this", self.this), ("that", self.that)):
            rate = median(run.tokens_per_s for run in runs)
            roles = {
                role: median(run.cpu_us_per_token[role] for run in runs) for role in runs[0].cpu_us_per_token
            }
            by_role = ", ".join(f"{role} {us:.2f}" for role, us in roles.items())
            lines.append(
                f"    {name} {rate:,.0f} tokens/s; us per token: {median(run.cpu_us for run in runs):.2f}: {by_role}"
            )
        for name, ratios in (("throughput", self.ratios), ("CPU time", self.cpu_ratios)):
            shown = " ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
            lines.append(f"    {name}, this / that: {median(ratios):.3f} ({shown})")
        return "\n".join(lines)


class Pairs(msgspec.Struct):
    """Contents of the result file."""

    date: str
    this: str
    """Commit of this checkout."""
    that: str
    """Commit of the other checkout."""
    machine: Machine
    points: list[PairsOfPoint]


def run_load_once(server: Server, point: Point, waves: int, output_len: int, seed: int) -> Run:
    """Send one load to a server."""
    num_requests = point.streams * waves
    spec = PromptSpec(
        num_requests, INPUT_LEN, words_per_token=words_per_token(server.target, "null"), seed=seed
    )
    shape = RequestShape("/v1/completions", "null", output_len, ignore_eos=True)
    bodies = [shape.body(item) for item in random_prompts(spec)]
    before = server.cpu_seconds()
    summary = measured(Load(server.target, shape.endpoint, bodies, point.streams), progress=False)
    after = server.cpu_seconds()
    if summary.num_completed != num_requests:
        raise RuntimeError(
            f"only {summary.num_completed} of {num_requests} requests completed: {summary.failures}"
        )
    num_tokens = summary.output_tokens
    cpu_us = {
        role: round(1e6 * (after[role] - before.get(role, 0.0)) / num_tokens, 3) for role in sorted(after)
    }
    return Run(summary.output_tokens_per_s, cpu_us)


def compare(model: Path, point: Point, output_len: int, that: Path, rounds: int) -> PairsOfPoint:
    """Run both servers and send loads to them in turn."""
    flags = ["--served-model-name", "null", "--max-num-seqs", "256", *point.flags]
    with serve(model, flags, THIS) as this_server, serve(model, flags, that) as that_server:
        runs: dict[str, list[Run]] = {this_server.url: [], that_server.url: []}
        for server in (this_server, that_server):
            run_load_once(server, point, 1, output_len, seed=1000)  # warm-up
        for number in range(rounds):
            for server in (this_server, that_server) if number % 2 else (that_server, this_server):
                runs[server.url].append(run_load_once(server, point, point.waves, output_len, seed=number))
    return PairsOfPoint(point.case, point.streams, output_len, runs[this_server.url], runs[that_server.url])


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout."""
    description = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=folder
    )
    return description.stdout.strip()


def points(case: str, streams: int | None, waves: int | None) -> list[Point]:
    """Return the points of a case (a letter; empty: all), with this number of streams and waves if given."""
    results = [point for point in POINTS if point.case.startswith(case)]
    if streams is not None:
        by_case = {point.case: point for point in reversed(results)}
        same = [point for point in results if point.streams == streams]
        results = same or [dataclasses.replace(point, streams=streams) for point in by_case.values()]
    return [dataclasses.replace(point, waves=waves or point.waves) for point in results]


def main() -> None:
    """Measure, print and write."""
    parser = command_parser(__doc__)
    parser.add_argument("that", type=Path, metavar="FOLDER", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of each point (default: 6)")
    parser.add_argument("--only", choices=("a", "b"), help="run only this case")
    parser.add_argument("--streams", type=int, help="number of streams (default: all points)")
    parser.add_argument("--waves", type=int, help="requests per stream in one load (default: the point's)")
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN, help="output tokens (default: 128)")
    parser.add_argument("--out", type=Path, help="file for the raw results (default: none)")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="null-model-") as folder:
        model = make_null_model(Path(folder))
        for point in points(options.only or "", options.streams, options.waves):
            results.append(compare(model, point, options.output_len, options.that.resolve(), options.rounds))
            print(results[-1].text(), flush=True)
    if options.out is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Pairs(date, commit_of(THIS), commit_of(options.that), machine(), results)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
