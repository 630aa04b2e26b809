"""Decoding with a small model of each kind: beside what memory allows, beside a Llama of as many bytes, beside llama.cpp.

Random weights of a published shape (or a smaller one of its kind). A kind's steps, those of its Llama and llama.cpp's are
computed in turn, a few of each at a time, with the read rate measured between; medians count. The columns:

* MB a step: what it moves: weights once, of experts those that were chosen, keys and values, and states twice, since each is
  read and written. (What a token's own key and value take is left out: it is 0.03 % of the step.)
* of reading: the time in which so many bytes are read over the step's. A kind that Quintet has no layers for is computed by
  transformers, and its row says so.
* x Llama: the step's time for a byte over that of a Llama with as many layers, heads and words. Its feed-forward is as
  wide as makes it read as many bytes (`bench.families.kinds.llama_hf_config`), computed by our layers. Of bytes that come with a
  multiplication for each request it has as many as there are bytes; of a state each byte is one request's, and a scan's
  multiplications, some 5 an element, are fewer.
* x llama.cpp: its time for a step over ours, where it knows the family and `python -m bench.peers install` was run.

    python -m bench.families                                 # all kinds
    python -m bench.families --kinds llama experts --rows 1 8 --save bench/results/families-2026-11-22.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from bench.arguments import command_parser
from bench.families.kinds import BITS, KINDS, hf_config_of, llama_hf_config
from bench.families.models import Decoding, Room, open_model
from bench.families.peer import FORMATS, LlamaCpp, interpreter
from bench.kernels.limits import Limits
from bench.peers.__main__ import DEFAULT_HOME
from bench.peers.records import this_commit, this_machine
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library
from quintet.wire.errors import ConfigError

IN_TURN = 4
"""Steps of one before the next has its turn."""
REST_S = 0.02
"""After llama.cpp's: its threads spin a little before they sleep."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A kind at a number of requests."""

    kind: str
    implementation: str
    rows: int
    step_ms: float
    tokens_per_s: float
    step_mb: float
    read_gb_s: float
    of_reading: float
    llama_ms: float
    llama_mb: float
    of_llama: float
    """The step's time for a byte over its Llama's."""
    llama_cpp_ms: float | None
    of_llama_cpp: float | None
    """llama.cpp's time for a step over ours."""

    def line(self) -> str:
        """Return a row of the table."""
        implementation = "" if self.implementation == "quintet" else f" ({self.implementation})"
        cpp = "–" if self.of_llama_cpp is None else f"{self.of_llama_cpp:.2f}"
        return (
            f"| {self.kind}{implementation} | {self.rows} | {self.step_ms:.2f} | {self.tokens_per_s:,.0f} | {self.step_mb:,.0f} "
            f"| {self.of_reading:.0%} of {self.read_gb_s:.0f} GB/s | {self.of_llama:.2f} | {cpp} |"
        )


HEAD = (
    "| kind | requests | ms a step | tokens/s | MB a step | of reading | × Llama | × llama.cpp |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True, slots=True)
class Turns:
    """Measurements in turn: seconds of steps, read rates, and the bytes of our steps."""

    ours: list[float] = field(default_factory=list)
    llama: list[float] = field(default_factory=list)
    llama_cpp: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)


def in_turn(
    limits: Limits,
    ours: Decoding,
    llama: Decoding,
    peer: LlamaCpp | None,
    args: argparse.Namespace,
    rows: int,
) -> Turns:
    """Compute a few steps of each, again and again."""
    turns = Turns()
    for _ in range(-(-args.repetitions // IN_TURN)):
        turns.read_gb_s.extend(limits.read_gb_s() for _ in range(2))
        for _ in range(IN_TURN):
            turns.ours.append(ours.seconds())
            turns.step_bytes.append(ours.step_bytes())
        turns.llama.extend(llama.seconds() for _ in range(IN_TURN))
        if peer is not None:
            turns.llama_cpp.extend(peer.seconds(rows, args.context, IN_TURN))
            time.sleep(REST_S)
    return turns


def measure(kind: str, folder: Path, args: argparse.Namespace, limits: Limits) -> Iterator[Figures]:
    """Measure a kind at each number of requests. Raises ConfigError where it is not served."""
    room = Room(
        dtype=args.dtype,
        quantization=args.quantization,
        model_impl=args.model_impl,
        threads=args.threads,
        max_rows=max(args.rows),
        context=args.context,
        max_steps=args.repetitions + 2 * IN_TURN,
    )
    hf_config = hf_config_of(kind, args.dtype)
    config, worker = open_model(folder / "kind", hf_config, room)
    peer = None
    if (
        (python := interpreter(args.home.expanduser()))
        and args.dtype == "bfloat16"
        and args.quantization in FORMATS
    ):
        with suppress(ValueError):
            threads = args.threads or torch.get_num_threads()
            peer = LlamaCpp(python, folder / "kind", args.quantization, threads, room.max_steps)
    try:
        for rows in args.rows:
            ours = Decoding(config, worker, rows, args.context)
            twin = llama_hf_config(
                args.dtype, args.quantization, hf_config, ours.step_bytes(), rows * args.context
            )
            llama_model = open_model(folder / f"llama-{rows}", twin, replace(room, model_impl="quintet"))
            llama = Decoding(*llama_model, rows, args.context)
            turns = in_turn(limits, ours, llama, peer, args, rows)
            step, its_step = statistics.median(turns.ours), statistics.median(turns.llama)
            mean_bytes, read = statistics.mean(turns.step_bytes), statistics.median(turns.read_gb_s)
            cpp_step = statistics.median(turns.llama_cpp) if turns.llama_cpp else None
            if args.operations:
                print_operations(kind, ours)
                print_operations("its Llama", llama)
            yield Figures(
                kind=kind,
                implementation=config.model.implementation,
                rows=rows,
                step_ms=step * 1e3,
                tokens_per_s=rows / step,
                step_mb=mean_bytes / 1e6,
                read_gb_s=read,
                of_reading=mean_bytes / 1e9 / read / step,
                llama_ms=its_step * 1e3,
                llama_mb=llama.step_bytes() / 1e6,
                of_llama=step / mean_bytes / (its_step / llama.step_bytes()),
                llama_cpp_ms=cpp_step and cpp_step * 1e3,
                of_llama_cpp=cpp_step and cpp_step / step,
            )
    finally:
        if peer is not None:
            peer.stop()


def print_operations(name: str, decoding: Decoding) -> None:
    """Print what a step's operations take, each by itself: from one to the next nothing is fetched ahead."""
    for operation, (times, seconds) in decoding.operations(IN_TURN * 2).items():
        print(f"    {name:16s} {operation:28s} {times:4d} times {seconds * 1e3:8.3f} ms")


def save(path: Path, args: argparse.Namespace, figures: list[Figures], instructions: str) -> None:
    """Write what was measured, and where."""
    machine = this_machine()
    report = {
        "command": "python -m bench.families",
        "date": time.strftime("%Y-%m-%d"),
        "commit": this_commit(),
        "machine": {name: getattr(machine, name) for name in machine.__struct_fields__},
        "instruction_set": instructions,
        "quantization": args.quantization,
        "context": args.context,
        "figures": [asdict(each) for each in figures],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests in a step")
    parser.add_argument("--context", type=int, default=256, help="tokens each has before")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=BITS, default="none")
    parser.add_argument("--model-impl", choices=("auto", "quintet", "transformers"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as the server chooses")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="of bench.peers: where llama.cpp is")
    parser.add_argument("--operations", action="store_true", help="before each row: what its operations take")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    library = open_library()
    assert library is not None, "the compiled kernels are not built"
    torch.set_grad_enabled(False)
    limits = Limits(library)
    print(HEAD)
    figures = []
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for each in measure(kind, Path(folder), args, limits):
                    figures.append(each)
                    print(each.line(), flush=True)
            except ConfigError as error:
                print(f"| {kind} | {str(error).removeprefix(folder)} |", flush=True)
    if args.save:
        save(args.save, args, figures, instruction_set(library))


if __name__ == "__main__":
    main()
