"""Compare this checkout with another one, in turns within one run: the cost of a change to requests that do not use it.

Of each point of `bench.overhead.run` both servers run at once, and one of them is loaded at a time: this, that, that, this, …
Medians, and the medians of the ratios of adjacent runs, of rates and of processor time per token: the latter hardly depends on
what else the machine does.

    python -m bench.overhead.pairs FOLDER [--only a] [--rounds 6]    FOLDER: another checkout, built
    python -m bench.overhead.pairs FOLDER --only a --streams 15 --waves 8 --output-len 256    a point of one's own
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
    """One load on one server."""

    tokens_per_s: float
    cpu_us_per_token: dict[str, float]
    """Processor time of the server's processes, by role."""

    @property
    def cpu_us(self) -> float:
        """All together."""
        return sum(self.cpu_us_per_token.values())


class PairsOfPoint(msgspec.Struct):
    """All of one point, in their order."""

    case: str
    streams: int
    output_len: int
    this: list[Run]
    that: list[Run]

    @property
    def ratios(self) -> list[float]:
        """This one's rate over that one's, pair by pair."""
        return [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.this, self.that, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """Cost of a token here over its cost there, pair by pair."""
        return [a.cpu_us / b.cpu_us for a, b in zip(self.this, self.that, strict=True)]

    def described(self) -> str:
        """Return what there is to say, in lines."""
        lines = [f"{self.case}, {self.streams} streams, {self.output_len} tokens out"]
        for name, runs in (("this", self.this), ("that", self.that)):
            rate = median(run.tokens_per_s for run in runs)
            roles = {
                role: median(run.cpu_us_per_token[role] for run in runs) for role in runs[0].cpu_us_per_token
            }
            by_role = ", ".join(f"{role} {us:.2f}" for role, us in roles.items())
            lines.append(
                f"    {name} {rate:,.0f} tokens/s; us a token: {median(run.cpu_us for run in runs):.2f}: {by_role}"
            )
        for name, ratios in (("rates", self.ratios), ("processor time", self.cpu_ratios)):
            shown = " ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
            lines.append(f"    {name}, this over that: {median(ratios):.3f} ({shown})")
        return "\n".join(lines)


class Pairs(msgspec.Struct):
    """The file."""

    date: str
    this: str
    that: str
    """Commits."""
    machine: Machine
    points: list[PairsOfPoint]


def load(server: Server, point: Point, waves: int, output_len: int, seed: int) -> Run:
    """Load one server once."""
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
    spent = {
        role: round(1e6 * (after[role] - before.get(role, 0.0)) / num_tokens, 3) for role in sorted(after)
    }
    return Run(summary.output_tokens_per_s, spent)


def compare(model: Path, point: Point, output_len: int, that: Path, rounds: int) -> PairsOfPoint:
    """Run both servers and load them in turns."""
    flags = ["--served-model-name", "null", "--max-num-seqs", "256", *point.flags]
    with serve(model, flags, THIS) as here, serve(model, flags, that) as there:
        runs: dict[str, list[Run]] = {here.url: [], there.url: []}
        for server in (here, there):
            load(server, point, 1, output_len, seed=1000)  # warm-up
        for number in range(rounds):
            for server in (here, there) if number % 2 else (there, here):
                runs[server.url].append(load(server, point, point.waves, output_len, seed=number))
    return PairsOfPoint(point.case, point.streams, output_len, runs[here.url], runs[there.url])


def commit_of(folder: Path) -> str:
    """Return the commit that a checkout is at."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=folder
    )
    return asked.stdout.strip()


def points(case: str, streams: int | None, waves: int | None) -> list[Point]:
    """Return the points of a case (a letter, or none for all); of other streams or waves than those of the table, if given."""
    found = [point for point in POINTS if point.case.startswith(case)]
    if streams is not None:
        by_case = {point.case: point for point in reversed(found)}
        same = [point for point in found if point.streams == streams]
        found = same or [dataclasses.replace(point, streams=streams) for point in by_case.values()]
    return [dataclasses.replace(point, waves=waves or point.waves) for point in found]


def main() -> None:
    """Run, print, write."""
    parser = command_parser(__doc__)
    parser.add_argument("that", type=Path, metavar="FOLDER", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of each point (default: 6)")
    parser.add_argument("--only", choices=("a", "b"), help="one case only")
    parser.add_argument("--streams", type=int, help="so many streams only")
    parser.add_argument(
        "--waves", type=int, help="requests per stream in one load (default: as the point says)"
    )
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN, help="tokens out (default: 128)")
    parser.add_argument("--out", type=Path, help="where to write the raw results (default: nowhere)")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="null-model-") as folder:
        model = make_null_model(Path(folder))
        for point in points(options.only or "", options.streams, options.waves):
            found.append(compare(model, point, options.output_len, options.that.resolve(), options.rounds))
            print(found[-1].described(), flush=True)
    if options.out is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Pairs(date, commit_of(THIS), commit_of(options.that), machine(), found)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
