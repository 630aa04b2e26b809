"""Draw a timeline of decode steps across the processes of a real server, and print a table of their times.

Starts `quintet serve MODEL --trace …`, sends N concurrent streams, and selects the steps in which all of them decode.

    python -m bench.timeline --model ./my-model --streams 8 --out step-timeline.svg
    python -m bench.timeline --model ./my-model -- --quantization int8 --threads 2     # further flags of the server
    python -m bench.timeline --streams 1 2 4 8 --save FILE -- --pipeline-parallel-size 2 --threads 1    # pipeline bubbles
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

SERVED_NAME = "traced"
NUM_FIGURE_STEPS = 3


def send_load(server: Server, streams: int, input_len: int, output_len: int, seed: int) -> None:
    """Send ``streams`` concurrent requests and wait for their ends."""
    per_token = words_per_token(server.target, SERVED_NAME)
    shape = RequestShape("/v1/completions", SERVED_NAME, output_len, ignore_eos=True)
    prompts = random_prompts(PromptSpec(streams, input_len, words_per_token=per_token, seed=seed))
    summary = measured(
        Load(server.target, shape.endpoint, [shape.body(item) for item in prompts], streams), progress=False
    )
    if summary.num_completed != streams:
        raise SystemExit(f"only {summary.num_completed} of {streams} requests completed: {summary.failures}")


def decode_steps_of(bars: Sequence[Bar], output_len: int) -> list[Step]:
    """Return the steps in which all streams of the last load decode: the middle half of its steps."""
    admitted_ns = max(bar.end_ns for bar in bars if bar.name == "admit")
    steps = [step for step in steps_of(bars) if step.begin_ns > admitted_ns]
    return steps[output_len // 4 : output_len * 3 // 4]


def typical_steps(steps: Sequence[Step], num: int) -> list[Step]:
    """Return the ``num`` successive steps with durations closest to the median."""
    lengths = [step.end_ns - step.begin_ns for step in steps]
    middle = median(lengths)
    starts = range(len(steps) - num + 1)
    best = min(starts, key=lambda at: max(abs(length - middle) for length in lengths[at : at + num]))
    return list(steps[best : best + num])


class Point(msgspec.Struct, frozen=True):
    """Step times with one number of streams."""

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
    """Run a server and the load; return the spans of all processes. lengths: prompt tokens and output tokens."""
    server_flags = ["--served-model-name", SERVED_NAME, "--trace", str(folder), *flags]
    with serve(model, server_flags) as server:
        send_load(server, streams, lengths[0], 8, seed=1)
        send_load(server, streams, *lengths, seed=2)
    return bars_of(merge(read_folder(folder)))


def draw_typical(
    streams: int, name: str, step_account: StepAccount, bars: Sequence[Bar], steps: Sequence[Step]
) -> str:
    """Return an SVG figure of the steps that are closest to the median one."""
    caption = [
        f"python -m bench.timeline --streams {streams}; the median step of {step_account.num_steps} takes "
        f"{step_account.step_ms:.2f} ms. Clock: CLOCK_MONOTONIC, the same for every process.",
        "The core plans and sends step N+1 while the executor computes step N; the results of step N are sent to "
        "clients while step N+1 computes.",
    ]
    title = f"{name}: {NUM_FIGURE_STEPS} decode steps of {streams} streams"
    return draw(title, caption, bars, typical_steps(steps, NUM_FIGURE_STEPS))


def main() -> None:
    """Run a server and the load for each number of streams, print the tables, and draw the figure."""
    argv = sys.argv[1:]
    own_arguments, flags = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    parser = command_parser(__doc__)
    parser.add_argument("--model", help="folder or hub name (default: the embedded model)")
    parser.add_argument("--name", help="name of the model in the title (default: --model)")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[8],
        help="concurrent requests; several values are measured one after another",
    )
    parser.add_argument("--input-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=96, help="output tokens of each stream")
    parser.add_argument("--out", type=Path, help="SVG file for the last number of streams (default: none)")
    parser.add_argument("--keep", type=Path, help="folder for the traces (default: deleted)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the tables as JSON")
    arguments = parser.parse_args(own_arguments)
    lengths, points = (arguments.input_len, arguments.output_len), []
    for streams in arguments.streams:
        with tempfile.TemporaryDirectory(prefix="timeline-") as scratch:
            folder = Path(scratch) if arguments.keep is None else arguments.keep / str(streams)
            bars = trace(arguments.model, folder, flags, streams, lengths)
        steps = decode_steps_of(bars, arguments.output_len)
        step_account = account(bars, steps)
        points.append(Point(streams, step_account))
        print(f"streams: {streams}\n{step_account.text()}\n", flush=True)
    if arguments.out is not None:
        name = arguments.name or arguments.model or "the embedded model"
        arguments.out.write_text(draw_typical(streams, name, step_account, bars, steps))
        print(f"written: {arguments.out}")
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), ["bench.timeline", *argv], points)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
