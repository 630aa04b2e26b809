"""Cost of the flight recorder: two servers run at once, one of which records; short loads alternate between them.

    python -m bench.chaos.recorder              both executors, about two minutes
    python -m bench.chaos.recorder --only mock

The other server is idle during a load (0.4 % of a core). Loads alternate within two seconds, so that other work on the machine
affects both. The result is the median of the pairs' ratios.

On a busy machine these ratios vary by more than the recorder's cost. So the recorder is also measured alone: it records the
frames of the recording again, without other load. The result is its CPU time, with that of its writer thread, compared with the
server's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.overhead.server import Server, serve
from quintet.deploy.cli.bench import measured, words_per_token
from quintet.deploy.tools.load_client.load import Load
from quintet.deploy.tools.load_client.workload import PromptSpec, RequestShape, random_prompts
from quintet.process import record
from quintet.process.record import Recorder, open_recording
from quintet.wire.ids import WorkerId

INPUT_LEN, OUTPUT_LEN = 32, 128
MODEL = "served"


@dataclass(frozen=True, slots=True)
class Case:
    """Executor flags and the size of one load."""

    streams: int
    waves: int
    flags: tuple[str, ...]


CASES: Mapping[str, Case] = {
    "mock": Case(256, 3, ("--executor", "mock", "--step-ms", "0", "--max-num-seqs", "256")),
    "embedded": Case(64, 1, ("--max-num-seqs", "64")),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one load."""

    tokens_per_s: float
    cpu_us: float
    """CPU time of the server per output token, in microseconds."""


def run_load_once(server: Server, case: Case, seed: int) -> Figures:
    """Send one load to the server."""
    spec = PromptSpec(
        case.streams * case.waves, INPUT_LEN, words_per_token=words_per_token(server.target, MODEL), seed=seed
    )
    shape = RequestShape("/v1/completions", MODEL, OUTPUT_LEN, ignore_eos=True)
    bodies = [shape.body(item) for item in random_prompts(spec)]
    before_s = sum(server.cpu_seconds().values())
    summary = measured(Load(server.target, shape.endpoint, bodies, case.streams), progress=False)
    cpu_s = sum(server.cpu_seconds().values()) - before_s
    if summary.num_completed != len(bodies):
        raise RuntimeError(f"{summary.num_completed} of {len(bodies)} requests completed: {summary.failures}")
    return Figures(summary.output_tokens_per_s, 1e6 * cpu_s / summary.output_tokens)


def compare(name: str, num_pairs: int, flags: Sequence[str]) -> None:
    """Run the pairs of one case and print their medians."""
    case = CASES[name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recording-")))
        usual = ("--served-model-name", MODEL, *case.flags, *flags)
        plain = stack.enter_context(serve(None, usual))
        recording = stack.enter_context(serve(None, (*usual, "--record", str(folder))))
        for server in (plain, recording):
            run_load_once(server, case, seed=1000)  # warm-up: not kept
        began = time.monotonic()
        before_bytes = _size_of(folder)
        pairs: list[tuple[Figures, Figures]] = []
        for number in range(num_pairs):
            first, second = (plain, recording) if number % 2 else (recording, plain)
            one, other = run_load_once(first, case, number), run_load_once(second, case, number)
            pairs.append((one, other) if first is plain else (other, one))
        num_bytes = _size_of(folder) - before_bytes
        seconds = time.monotonic() - began
        recorder_us = record_again(folder, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    rate = median(on.tokens_per_s / off.tokens_per_s for off, on in pairs)
    cpu = median(on.cpu_us / off.cpu_us for off, on in pairs)
    num_tokens = case.streams * case.waves * OUTPUT_LEN * num_pairs
    print(
        f"{name}, {case.streams} streams, {num_pairs} pairs in {seconds:.0f} s: with recording {100 * rate:.1f} % of the "
        f"tokens/s ({median(off.tokens_per_s for off, _ in pairs):,.0f} without) and {100 * cpu:.1f} % of the "
        f"CPU time ({median(off.cpu_us for off, _ in pairs):.2f} us per token without); "
        f"{num_bytes / num_tokens:.0f} bytes per token"
    )
    recorder_token_us = recorder_us / (num_tokens + case.streams * case.waves * OUTPUT_LEN)
    print(
        f"  recorder alone: {recorder_token_us:.3f} us per token, "
        f"{100 * recorder_token_us / median(off.cpu_us for off, _ in pairs):.2f} % of the server's CPU time"
    )
    print(
        "  tokens/s, ratio of each pair:",
        " ".join(f"{on.tokens_per_s / off.tokens_per_s:.3f}" for off, on in pairs),
    )
    print(
        "  CPU time, ratio of each pair:",
        " ".join(f"{on.cpu_us / off.cpu_us:.3f}" for off, on in pairs),
        flush=True,
    )


def record_again(folder: Path, target: Path) -> float:
    """Record the recordings of all processes again into ``target``; return the CPU time in microseconds."""
    total_s = 0.0
    record.MAX_BACKLOG_BYTES = 1 << 40  # frames arrive faster than in a server
    for path in folder.iterdir():
        recording = open_recording(folder, path.name)
        config = msgspec.structs.replace(recording.header.config, record=str(target))
        recorder = Recorder(recording.header.worker, config)
        iterations = [
            (
                iteration,
                [memoryview(payload) for payload in iteration.frames],
                [(WorkerId(sent.role, sent.index, 1), sent.payload) for sent in iteration.sent],
            )
            for iteration in recording.turns()
        ]
        began_s = time.process_time()
        for iteration, frames, sent in iterations:
            for frame in frames:
                recorder.received(frame)
            recorder.begin_iteration(iteration.now_ns, iteration.was_idle)
            for peer, payload in sent:
                recorder.sent(peer, payload)
        recorder.close()
        total_s += time.process_time() - began_s
    return 1e6 * total_s


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.rec"))


def main() -> None:
    """Run both cases, or one."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", choices=tuple(CASES), help="run only this case")
    parser.add_argument("--pairs", type=int, default=12, help="number of loads per server (default: 12)")
    parser.add_argument("flags", nargs="*", help="further flags of both servers, after --")
    arguments = parser.parse_args()
    for name in CASES:
        if arguments.only in (None, name):
            compare(name, arguments.pairs, arguments.flags)


if __name__ == "__main__":
    main()
