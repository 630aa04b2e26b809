"""Compare decode and prefill times of Quintet and llama.cpp in pairs, on machines with varying memory bandwidth.

    python -m bench.peers.steps S:q8_0 M:q4_k_m L:q4_k_m [--rounds 12] [--prompt 128] [--output 48] [--save RESULT.json]
    python -m bench.peers.steps --read RESULT.json [--paces 42 54]    # a saved run: rounds with low and with high bandwidth

Both engines run at once and get requests alternately. Memory bandwidth is measured before and after each request, since that of a
virtual machine may halve for seconds. A request is compared with the other engine's of the same round. Results are medians over
the rounds. Decode time is the time from first to last token. For machines with constant bandwidth use `python -m bench.peers
run`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.kernels.limits import Limits
from bench.peers.dimensions import DIMENSIONS
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.engines.llamacpp import LlamaCpp
from bench.peers.engines.quintet import Quintet
from bench.peers.jobs import Job
from bench.peers.token_bytes import token_bytes
from bench.peers.workload import FIRST_ID, GGUF_FILES, Precision
from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads

_VOCAB = 100_000
"""Token ids below this value are in the vocabulary of each model."""
_KV_BYTES = 1 << 29
_READS = 9
"""Bandwidth measurements before and after each request; they take about 70 ms."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one engine in one round."""

    token_ms: float
    """Time per token after the first one."""
    prompt_ms: float
    """Time to first token."""
    read_gb_s: float
    """Memory bandwidth before and after the request."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Results of all rounds with one file."""

    file: str
    weights_gb: float
    """Size in GB of the weights that a token reads."""
    answers: dict[str, list[Sample]]
    """Results of each round, by engine."""

    def token_ms(self, engine: str) -> float:
        """Return the median time of a token."""
        return median(each.token_ms for each in self.answers[engine])

    def prompt_ms(self, engine: str) -> float:
        """Return the median time of a prompt."""
        return median(each.prompt_ms for each in self.answers[engine])

    def share(self, engine: str) -> float:
        """Return the median share of the memory bandwidth that reads of weights use."""
        return median(
            self.weights_gb / each.token_ms * 1000 / each.read_gb_s for each in self.answers[engine]
        )

    def within(self, low: float, high: float) -> Pairs:
        """Return the rounds in which the bandwidth of both requests was between ``low`` and ``high`` GB/s."""
        rounds = [
            answers
            for answers in zip(*self.answers.values(), strict=True)
            if all(low <= each.read_gb_s <= high for each in answers)
        ]
        kept = {name: [answers[i] for answers in rounds] for i, name in enumerate(self.answers)}
        return Pairs(self.file, self.weights_gb, kept)

    def speedups(self, engine: str, other: str) -> tuple[float, float]:
        """Return the speedups of ``engine`` over ``other`` in decode and prefill, medians over the rounds."""
        pairs = list(zip(self.answers[engine], self.answers[other], strict=True))
        return median(b.token_ms / a.token_ms for a, b in pairs), median(
            b.prompt_ms / a.prompt_ms for a, b in pairs
        )


def measure(
    home: Home, limits: Limits, model: str, precision: Precision, lengths: tuple[int, int], rounds: int
) -> Pairs:
    """Start both engines with a file, and send requests alternately; each engine is first in every other round.

    lengths: prompt and output tokens.
    """
    setup, running = Setup(model, precision, "serve"), dict[str, Running]()
    answers: dict[str, list[Sample]] = {}
    try:
        for engine in (Quintet(), LlamaCpp()):
            running[engine.name] = engine.start(home, setup)
        for i in range(-1, rounds):  # the first round is a warm-up
            prompt = Random(i).choices(range(FIRST_ID, _VOCAB), k=lengths[0])
            for name, each in list(running.items())[:: 1 if i % 2 else -1]:
                sample = _measure_request(each, Job([prompt], [lengths[1]], 1, sum(lengths)), limits)
                if i >= 0:
                    answers.setdefault(name, []).append(sample)
    finally:
        for each in running.values():
            each.stop()
    weights_gb = token_bytes(home.gguf(model, precision)) / 1e9
    return Pairs(f"{model}:{precision}", round(weights_gb, 3), answers)


def _measure_request(engine: Running, job: Job, limits: Limits) -> Sample:
    before = _read_gb_s(limits)
    (served,) = engine.run(job).served
    read = (before + _read_gb_s(limits)) / 2
    speedups = served.token_times_s
    token_ms = (speedups[-1] - speedups[0]) / (len(speedups) - 1) * 1000
    return Sample(round(token_ms, 3), round((speedups[0] - served.start_s) * 1000, 2), round(read, 2))


def _read_gb_s(limits: Limits) -> float:
    return median(limits.read_gb_s() for _ in range(_READS))


def _parse_file(text: str) -> tuple[str, Precision]:
    model, _, precision = text.partition(":")
    if model not in DIMENSIONS or precision not in GGUF_FILES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not MODEL:FORMAT, like M:q4_k_m; models: {', '.join(DIMENSIONS)}; formats: {', '.join(GGUF_FILES)}"
        )
    return model, precision


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
        return int(text)

    return count


def _print(pairs: Pairs) -> None:
    for name in pairs.answers:
        print(
            f"{pairs.file:<10} {name:<10} {pairs.token_ms(name):7.2f} ms per token, {pairs.share(name):4.0%} of the bandwidth; "
            f"{pairs.prompt_ms(name):7.0f} ms per prompt",
            flush=True,
        )
    tokens, prompts = pairs.speedups(Quintet().name, LlamaCpp().name)
    reads = [each.read_gb_s for samples in pairs.answers.values() for each in samples]
    print(
        f"{pairs.file:<10} speedup of Quintet over llama.cpp: decode {tokens:.2f}, prefill {prompts:.2f}; "
        f"{len(reads) // 2} rounds, bandwidth {min(reads):.0f} to {max(reads):.0f} GB/s",
        flush=True,
    )


def _print_saved(path: Path, paces: tuple[float, float]) -> None:
    saved = msgspec.convert(json.loads(path.read_text())["steps"], list[Pairs])
    for pairs in saved:
        for rounds in (pairs.within(0, paces[0]), pairs.within(paces[1], float("inf"))):
            if all(rounds.answers.values()):
                _print(rounds)


def main() -> None:
    """Measure and print."""
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="*", type=_parse_file, metavar="MODEL:FORMAT")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print a saved run; measure nothing")
    parser.add_argument(
        "--paces",
        type=float,
        nargs=2,
        default=(42, 54),
        metavar="GB_S",
        help="bandwidths for --read: rounds below the first, and above the second",
    )
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "quintet-peers")
    parser.add_argument("--threads", type=_at_least(1), default=2)
    parser.add_argument("--rounds", type=_at_least(1), default=12)
    parser.add_argument("--prompt", type=_at_least(1), default=128, metavar="TOKENS")
    parser.add_argument("--output", type=_at_least(2), default=48, metavar="TOKENS")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write all results as JSON")
    arguments = parser.parse_args()
    if bool(arguments.files) == bool(arguments.read):
        parser.error("name files to measure, or --read a saved run")
    if arguments.read:
        _print_saved(arguments.read, tuple(arguments.paces))
        return
    lengths = arguments.prompt, arguments.output
    home = Home(arguments.home, arguments.threads, sum(lengths), _KV_BYTES)
    for model, precision in arguments.files:
        if not home.gguf(model, precision).exists():
            parser.error(f"{home.gguf(model, precision)} does not exist; run python -m bench.peers install")
    library = open_library()
    if library is None:
        parser.error("the compiled kernels are not built; run make install")
    set_threads(library, arguments.threads, pinned=False)
    limits, results = Limits(library), []
    for model, precision in arguments.files:
        results.append(measure(home, limits, model, precision, lengths, arguments.rounds))
        _print(results[-1])
        if arguments.save:  # keep the results of an interrupted run
            _save(arguments.save, arguments, results)


def _save(path: Path, arguments: argparse.Namespace, results: list[Pairs]) -> None:
    record = {
        "command": "python -m bench.peers.steps",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "prompt": arguments.prompt,
        "output": arguments.output,
        "steps": [asdict(each) for each in results],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
