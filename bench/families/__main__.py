"""Measure decode steps of a small model of each kind of family, compared with the memory bandwidth, a Llama, and llama.cpp.

Models have random weights and a published shape, or a smaller shape of the same kind. Steps of the model, of its Llama and of
llama.cpp alternate, a few of each at a time. The read bandwidth is measured between them. Results are medians. The columns:

* MB/step: bytes that a step moves: weights once, with chosen experts only; keys and values; states twice, since a step reads and
  writes them. The KV writes of the new token are not counted: 0.03 % of the step.
* of bandwidth: the time to read that many bytes, divided by the step time. Transformers computes the kinds for which Quintet has
  no layers; their rows name it.
* x Llama: step time per byte, divided by that of a Llama with the same number of layers, heads and tokens. The width of its
  feed-forward layers makes its step move as many bytes (`bench.families.kinds.llama_hf_config`). A Llama multiplies each weight
  with every request; a state belongs to one request, and a scan has about 5 multiplications per element.
* x llama.cpp: its step time divided by ours, where it has the family and `python -m bench.peers install` was run.

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
from bench.families.llamacpp_client import FORMATS, LlamaCpp, interpreter
from bench.families.models import Decoding, Setup, open_model
from bench.kernels.limits import Limits
from bench.peers.__main__ import DEFAULT_HOME
from bench.peers.records import this_commit, this_machine
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library
from quintet.wire.errors import ConfigError

STEPS_PER_TURN = 4
"""Steps of one model before the next model's."""
PAUSE_S = 0.02
"""Pause after steps of llama.cpp: its threads spin before they sleep."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a kind at one number of requests."""

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
    """Step time per byte, divided by that of its Llama."""
    llama_cpp_ms: float | None
    of_llama_cpp: float | None
    """llama.cpp's step time divided by ours."""

    def line(self) -> str:
        """Return a row of the table."""
        implementation = "" if self.implementation == "quintet" else f" ({self.implementation})"
        cpp = "–" if self.of_llama_cpp is None else f"{self.of_llama_cpp:.2f}"
        return (
            f"| {self.kind}{implementation} | {self.rows} | {self.step_ms:.2f} | {self.tokens_per_s:,.0f} | {self.step_mb:,.0f} "
            f"| {self.of_reading:.0%} of {self.read_gb_s:.0f} GB/s | {self.of_llama:.2f} | {cpp} |"
        )


TABLE_HEAD = (
    "| kind | requests | ms/step | tokens/s | MB/step | of bandwidth | × Llama | × llama.cpp |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True, slots=True)
class Samples:
    """Alternating measurements: step times in seconds, read bandwidths, and bytes of our steps."""

    ours: list[float] = field(default_factory=list)
    llama: list[float] = field(default_factory=list)
    llama_cpp: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)


def measure_in_turn(
    limits: Limits,
    ours: Decoding,
    llama: Decoding,
    peer: LlamaCpp | None,
    args: argparse.Namespace,
    rows: int,
) -> Samples:
    """Run `STEPS_PER_TURN` steps of each model, in turn, until ``args.repetitions`` steps are measured."""
    samples = Samples()
    for _ in range(-(-args.repetitions // STEPS_PER_TURN)):
        samples.read_gb_s.extend(limits.read_gb_s() for _ in range(2))
        for _ in range(STEPS_PER_TURN):
            samples.ours.append(ours.step_s())
            samples.step_bytes.append(ours.step_bytes())
        samples.llama.extend(llama.step_s() for _ in range(STEPS_PER_TURN))
        if peer is not None:
            samples.llama_cpp.extend(peer.step_s(rows, args.context, STEPS_PER_TURN))
            time.sleep(PAUSE_S)
    return samples


def measure(kind: str, folder: Path, args: argparse.Namespace, limits: Limits) -> Iterator[Figures]:
    """Measure a kind at each number of requests. Raises ConfigError if Quintet does not serve it."""
    setup = Setup(
        dtype=args.dtype,
        quantization=args.quantization,
        model_impl=args.model_impl,
        threads=args.threads,
        max_rows=max(args.rows),
        context=args.context,
        max_steps=args.repetitions + 2 * STEPS_PER_TURN,
    )
    hf_config = hf_config_of(kind, args.dtype)
    config, worker = open_model(folder / "kind", hf_config, setup)
    peer = None
    if (
        (python := interpreter(args.home.expanduser()))
        and args.dtype == "bfloat16"
        and args.quantization in FORMATS
    ):
        with suppress(ValueError):
            threads = args.threads or torch.get_num_threads()
            peer = LlamaCpp(python, folder / "kind", args.quantization, threads, setup.max_steps)
    try:
        for rows in args.rows:
            ours = Decoding(config, worker, rows, args.context)
            llama_config = llama_hf_config(
                args.dtype, args.quantization, hf_config, ours.step_bytes(), rows * args.context
            )
            llama_model = open_model(
                folder / f"llama-{rows}", llama_config, replace(setup, model_impl="quintet")
            )
            llama = Decoding(*llama_model, rows, args.context)
            samples = measure_in_turn(limits, ours, llama, peer, args, rows)
            step, llama_step = statistics.median(samples.ours), statistics.median(samples.llama)
            mean_bytes, read = statistics.mean(samples.step_bytes), statistics.median(samples.read_gb_s)
            cpp_step = statistics.median(samples.llama_cpp) if samples.llama_cpp else None
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
                llama_ms=llama_step * 1e3,
                llama_mb=llama.step_bytes() / 1e6,
                of_llama=step / mean_bytes / (llama_step / llama.step_bytes()),
                llama_cpp_ms=cpp_step and cpp_step * 1e3,
                of_llama_cpp=cpp_step and cpp_step / step,
            )
    finally:
        if peer is not None:
            peer.stop()


def print_operations(name: str, decoding: Decoding) -> None:
    """Print the times of a step's operations, timed separately: without prefetch for the next operation."""
    for operation, (count, seconds) in decoding.operations(STEPS_PER_TURN * 2).items():
        print(f"    {name:16s} {operation:28s} {count:4d} times {seconds * 1e3:8.3f} ms")


def save(path: Path, args: argparse.Namespace, figures: list[Figures], instructions: str) -> None:
    """Write the figures, the machine and the commit as JSON."""
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
    parser.add_argument("--context", type=int, default=256, help="tokens of each request in the KV cache")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=BITS, default="none")
    parser.add_argument("--model-impl", choices=("auto", "quintet", "transformers"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: the server's default")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--home", type=Path, default=DEFAULT_HOME, help="folder of bench.peers, with llama.cpp"
    )
    parser.add_argument(
        "--operations", action="store_true", help="print the time of each operation before each row"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the figures as JSON")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    library = open_library()
    assert library is not None, "the compiled kernels are not built"
    torch.set_grad_enabled(False)
    limits = Limits(library)
    print(TABLE_HEAD)
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
