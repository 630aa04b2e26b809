"""Timeline of a decode step across the processes of a real server: a picture and a table.

Starts `quintet serve MODEL --trace …`, has N streams decode at the same time, and takes the steps in which all of them do.

    python -m bench.timeline --model ./my-model --streams 8 --out step-timeline.svg
    python -m bench.timeline --model ./my-model -- --quantization int8 --threads 2     # more flags for the server
    python -m bench.timeline --streams 1 2 4 8 --save FILE -- --pipeline-parallel-size 2 --threads 1    # bubbles of the stages
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from bench.overhead.server import Server, serve
from bench.timeline.figure import draw
from quintet.deploy.cli.bench import measured, words_per_token
from quintet.deploy.tools.load_client.load import Load
from quintet.deploy.tools.load_client.workload import PromptSpec, RequestShape, random_prompts
from quintet.deploy.tools.step_account import Bar, Step, StepAccount, account, bars_of, read_folder, steps_of
from quintet.process.trace import merge

SERVED_AS = "traced"
NUM_DRAWN = 3


def drive(server: Server, streams: int, input_len: int, output_len: int, seed: int) -> None:
    """Have ``streams`` requests answered at the same time."""
    per_token = words_per_token(server.target, SERVED_AS)
    shape = RequestShape("/v1/completions", SERVED_AS, output_len, ignore_eos=True)
    prompts = random_prompts(PromptSpec(streams, input_len, words_per_token=per_token, seed=seed))
    summary = measured(
        Load(server.target, shape.endpoint, [shape.body(item) for item in prompts], streams), progress=False
    )
    if summary.num_completed != streams:
        raise SystemExit(f"only {summary.num_completed} of {streams} requests completed: {summary.failures}")


def decoding(bars: Sequence[Bar], output_len: int) -> list[Step]:
    """Return the steps in which every stream of the last load decoded: the middle half of it, in steps."""
    admitted_ns = max(bar.end_ns for bar in bars if bar.name == "admit")
    steps = [step for step in steps_of(bars) if step.begin_ns > admitted_ns]
    return steps[output_len // 4 : output_len * 3 // 4]


def typical(steps: Sequence[Step], num: int) -> list[Step]:
    """Return the ``num`` steps in a row that differ least from the median one."""
    lengths = [step.end_ns - step.begin_ns for step in steps]
    middle = median(lengths)
    starts = range(len(steps) - num + 1)
    best = min(starts, key=lambda at: max(abs(length - middle) for length in lengths[at : at + num]))
    return list(steps[best : best + num])


class Point(msgspec.Struct, frozen=True):
    """The account of so many streams."""

    streams: int
    account: StepAccount


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    command: list[str]
    points: list[Point]


def trace(
    model: str | None, folder: Path, flags: Sequence[str], streams: int, lengths: tuple[int, int]
) -> list[Bar]:
    """Serve, have so many streams decode, and return what every process did. lengths: of prompts and outputs."""
    serving = ["--served-model-name", SERVED_AS, "--trace", str(folder), *flags]
    with serve(model, serving) as server:
        drive(server, streams, lengths[0], 8, seed=1)
        drive(server, streams, *lengths, seed=2)
    return bars_of(merge(read_folder(folder)))


def picture(streams: int, name: str, taken: StepAccount, bars: Sequence[Bar], steps: Sequence[Step]) -> str:
    """Draw the steps that are most like the median one."""
    caption = [
        f"python -m bench.timeline --streams {streams}; the median step of {taken.num_steps} takes "
        f"{taken.step_ms:.2f} ms. Clock: CLOCK_MONOTONIC, the same for every process.",
        "Plan N+1 is made and sent while step N computes; the results of step N are sent to clients while "
        "step N+1 computes.",
    ]
    title = f"{name}: {NUM_DRAWN} decode steps of {streams} streams"
    return draw(title, caption, bars, typical(steps, NUM_DRAWN))


def main() -> None:
    """Run a server and the load for each number of streams, draw, and print the accounts."""
    words = sys.argv[1:]
    own, flags = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = command_parser(__doc__)
    parser.add_argument("--model", help="folder or hub name (default: the model that ships with Quintet)")
    parser.add_argument("--name", help="what the title calls the model (default: --model)")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[8],
        help="requests that decode together; of several one after the other",
    )
    parser.add_argument("--input-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=96, help="tokens that each stream draws")
    parser.add_argument(
        "--out", type=Path, help="SVG file to write, of the last number of streams (default: none)"
    )
    parser.add_argument("--keep", type=Path, help="folder for the traces (default: thrown away)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the accounts as JSON")
    arguments = parser.parse_args(own)
    lengths, points = (arguments.input_len, arguments.output_len), []
    for streams in arguments.streams:
        with tempfile.TemporaryDirectory(prefix="timeline-") as scratch:
            folder = Path(scratch) if arguments.keep is None else arguments.keep / str(streams)
            bars = trace(arguments.model, folder, flags, streams, lengths)
        steps = decoding(bars, arguments.output_len)
        taken = account(bars, steps)
        points.append(Point(streams, taken))
        print(f"streams: {streams}\n{taken.text()}\n", flush=True)
    if arguments.out is not None:
        name = arguments.name or arguments.model or "the model that ships with Quintet"
        arguments.out.write_text(picture(streams, name, taken, bars, steps))
        print(f"written: {arguments.out}")
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), ["bench.timeline", *words], points)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
