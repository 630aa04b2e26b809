"""Cost of the flight recorder: two servers at once, one of which records, and short loads to one and the other in turn.

    python -m bench.chaos.recorder              both executors, about two minutes
    python -m bench.chaos.recorder --only mock

The server that is not loaded idles (0.4 % of a core). Loads follow each other within a second or two, so that what the
machine does meanwhile meets both; the figure is the median of the pairs' quotients. Where the machine is not quiet they
differ by more than the recorder costs, so that is measured directly as well: what was recorded is recorded once more, turn
by turn, with no other load, and its processor time (the writing thread's included) is set against the server's.
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
    """One executor, and how much it is asked for at a time."""

    streams: int
    waves: int
    flags: tuple[str, ...]


CASES: Mapping[str, Case] = {
    "mock": Case(256, 3, ("--executor", "mock", "--step-ms", "0", "--max-num-seqs", "256")),
    "embedded": Case(64, 1, ("--max-num-seqs", "64")),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One load."""

    tokens_per_s: float
    cpu_us: float
    """Processor time of the server per output token."""


def burst(server: Server, case: Case, seed: int) -> Figures:
    """Load the server once."""
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
            burst(server, case, seed=1000)  # warm-up: not kept
        began = time.monotonic()
        before_bytes = _size_of(folder)
        pairs: list[tuple[Figures, Figures]] = []
        for number in range(num_pairs):
            first, second = (plain, recording) if number % 2 else (recording, plain)
            one, other = burst(first, case, number), burst(second, case, number)
            pairs.append((one, other) if first is plain else (other, one))
        num_bytes = _size_of(folder) - before_bytes
        seconds = time.monotonic() - began
        again_us = again(folder, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    rate = median(on.tokens_per_s / off.tokens_per_s for off, on in pairs)
    cpu = median(on.cpu_us / off.cpu_us for off, on in pairs)
    num_tokens = case.streams * case.waves * OUTPUT_LEN * num_pairs
    print(
        f"{name}, {case.streams} streams, {num_pairs} pairs in {seconds:.0f} s: recording gives {100 * rate:.1f} % of the "
        f"tokens/s ({median(off.tokens_per_s for off, _ in pairs):,.0f} without) and takes {100 * cpu:.1f} % of the "
        f"processor time ({median(off.cpu_us for off, _ in pairs):.2f} us a token without); "
        f"{num_bytes / num_tokens:.0f} bytes a token"
    )
    direct_us = again_us / (num_tokens + case.streams * case.waves * OUTPUT_LEN)
    print(
        f"  directly: {direct_us:.3f} us a token, {100 * direct_us / median(off.cpu_us for off, _ in pairs):.2f} % of the "
        "server's processor time"
    )
    print(
        "  tokens/s, pair by pair:",
        " ".join(f"{on.tokens_per_s / off.tokens_per_s:.3f}" for off, on in pairs),
    )
    print(
        "  processor time:        ",
        " ".join(f"{on.cpu_us / off.cpu_us:.3f}" for off, on in pairs),
        flush=True,
    )


def again(folder: Path, elsewhere: Path) -> float:
    """Record every process's recording once more; return the microseconds of processor time that took."""
    total_s = 0.0
    record.MAX_BACKLOG_BYTES = 1 << 40  # here frames come faster than from any server
    for path in folder.iterdir():
        recording = open_recording(folder, path.name)
        config = msgspec.structs.replace(recording.header.config, record=str(elsewhere))
        recorder = Recorder(recording.header.worker, config)
        turns = [
            (
                turn,
                [memoryview(payload) for payload in turn.frames],
                [(WorkerId(sent.role, sent.index, 1), sent.payload) for sent in turn.sent],
            )
            for turn in recording.turns()
        ]
        began_s = time.process_time()
        for turn, frames, sent in turns:
            for frame in frames:
                recorder.received(frame)
            recorder.begin_iteration(turn.now_ns, turn.was_idle)
            for peer, payload in sent:
                recorder.sent(peer, payload)
        recorder.close()
        total_s += time.process_time() - began_s
    return 1e6 * total_s


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.rec"))


def main() -> None:
    """Compare both cases, or one."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", choices=tuple(CASES), help="one case only")
    parser.add_argument("--pairs", type=int, default=12, help="loads of each server (default: 12)")
    parser.add_argument("flags", nargs="*", help="more flags for both servers, after --")
    arguments = parser.parse_args()
    for name in CASES:
        if arguments.only in (None, name):
            compare(name, arguments.pairs, arguments.flags)


if __name__ == "__main__":
    main()
