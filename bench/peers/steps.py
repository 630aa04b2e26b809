"""Cost of a token and a prompt at varying memory speed: Quintet and llama.cpp in turn, pair by pair.

    python -m bench.peers.steps S:q8_0 M:q4_k_m L:q4_k_m [--rounds 12] [--prompt 128] [--output 48] [--save RESULT.json]
    python -m bench.peers.steps --read RESULT.json [--paces 42 54]    # of a saved run, rounds of slow and of fast memory apart

Both are up and get one request after the other, and right before and after each answer memory is read. What an answer is held
against is the other engine's of the same round, and what was read beside it: a virtual machine's memory may be half as
fast for seconds. Medians over the rounds. An answer's time is that from its first token to its last. `bench.peers run` has the
rows of a machine that stays as it is.
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
"""Ids below are in every model's vocabulary."""
_KV_BYTES = 1 << 29
_READS = 9
"""Of memory, before and after each answer: some 70 ms."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine's, of one round."""

    token_ms: float
    """Behind the first."""
    prompt_ms: float
    """To the first token."""
    read_gb_s: float
    """Memory bandwidth measured next to it."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rounds of one file."""

    file: str
    weights_gb: float
    """Bytes of it that a token reads."""
    answers: dict[str, list[Answer]]
    """By engine, one of each round."""

    def token_ms(self, engine: str) -> float:
        """Return the median time of a token."""
        return median(each.token_ms for each in self.answers[engine])

    def prompt_ms(self, engine: str) -> float:
        """Return the median time of a prompt."""
        return median(each.prompt_ms for each in self.answers[engine])

    def share(self, engine: str) -> float:
        """Return how much of what memory gave was read of weights, the median round."""
        return median(
            self.weights_gb / each.token_ms * 1000 / each.read_gb_s for each in self.answers[engine]
        )

    def within(self, least: float, most: float) -> Pairs:
        """Return the rounds in which memory gave so many GB/s beside either answer."""
        rounds = [
            answers
            for answers in zip(*self.answers.values(), strict=True)
            if all(least <= each.read_gb_s <= most for each in answers)
        ]
        kept = {name: [answers[i] for answers in rounds] for i, name in enumerate(self.answers)}
        return Pairs(self.file, self.weights_gb, kept)

    def times(self, engine: str, other: str) -> tuple[float, float]:
        """Return how often ``engine`` is faster than ``other`` at tokens and at prompts, medians over the rounds."""
        pairs = list(zip(self.answers[engine], self.answers[other], strict=True))
        return median(b.token_ms / a.token_ms for a, b in pairs), median(
            b.prompt_ms / a.prompt_ms for a, b in pairs
        )


def measure(
    home: Home, limits: Limits, model: str, precision: Precision, lengths: tuple[int, int], rounds: int
) -> Pairs:
    """Start both with a file, and ask them in turn, each first in every other round.

    lengths: of prompt and answer, tokens.
    """
    setup, running = Setup(model, precision, "serve"), dict[str, Running]()
    answers: dict[str, list[Answer]] = {}
    try:
        for engine in (Quintet(), LlamaCpp()):
            running[engine.name] = engine.start(home, setup)
        for i in range(-1, rounds):  # the first warms up
            prompt = Random(i).choices(range(FIRST_ID, _VOCAB), k=lengths[0])
            for name, each in list(running.items())[:: 1 if i % 2 else -1]:
                answer = _ask(each, Job([prompt], [lengths[1]], 1, sum(lengths)), limits)
                if i >= 0:
                    answers.setdefault(name, []).append(answer)
    finally:
        for each in running.values():
            each.stop()
    weights_gb = token_bytes(home.gguf(model, precision)) / 1e9
    return Pairs(f"{model}:{precision}", round(weights_gb, 3), answers)


def _ask(engine: Running, job: Job, limits: Limits) -> Answer:
    before = _read_gb_s(limits)
    (served,) = engine.run(job).served
    read = (before + _read_gb_s(limits)) / 2
    times = served.token_times_s
    token_ms = (times[-1] - times[0]) / (len(times) - 1) * 1000
    return Answer(round(token_ms, 3), round((times[0] - served.start_s) * 1000, 2), round(read, 2))


def _read_gb_s(limits: Limits) -> float:
    return median(limits.read_gb_s() for _ in range(_READS))


def _file(text: str) -> tuple[str, Precision]:
    model, _, precision = text.partition(":")
    if model not in DIMENSIONS or precision not in GGUF_FILES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no MODEL:FORMAT; models are {', '.join(DIMENSIONS)}, formats {', '.join(GGUF_FILES)}, as in M:q4_k_m"
        )
    return model, precision


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least} on")
        return int(text)

    return count


def _show(pairs: Pairs) -> None:
    for name in pairs.answers:
        print(
            f"{pairs.file:<10} {name:<10} a token {pairs.token_ms(name):7.2f} ms, {pairs.share(name):4.0%} of reading; "
            f"a prompt {pairs.prompt_ms(name):7.0f} ms",
            flush=True,
        )
    tokens, prompts = pairs.times(Quintet().name, LlamaCpp().name)
    reads = [each.read_gb_s for its in pairs.answers.values() for each in its]
    print(
        f"{pairs.file:<10} Quintet is {tokens:.2f} times llama.cpp at tokens, {prompts:.2f} at prompts; "
        f"{len(reads) // 2} rounds, memory gave {min(reads):.0f} to {max(reads):.0f} GB/s",
        flush=True,
    )


def _show_saved(path: Path, paces: tuple[float, float]) -> None:
    saved = msgspec.convert(json.loads(path.read_text())["steps"], list[Pairs])
    for pairs in saved:
        for rounds in (pairs.within(0, paces[0]), pairs.within(paces[1], float("inf"))):
            if all(rounds.answers.values()):
                _show(rounds)


def main() -> None:
    """Measure and print."""
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="*", type=_file, metavar="MODEL:FORMAT")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: show a saved run")
    parser.add_argument("--paces", type=float, nargs=2, default=(42, 54), metavar="GB_S", help="with --read")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "quintet-peers")
    parser.add_argument("--threads", type=_at_least(1), default=2)
    parser.add_argument("--rounds", type=_at_least(1), default=12)
    parser.add_argument("--prompt", type=_at_least(1), default=128, metavar="TOKENS")
    parser.add_argument("--output", type=_at_least(2), default=48, metavar="TOKENS")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every answer as JSON too")
    arguments = parser.parse_args()
    if bool(arguments.files) == bool(arguments.read):
        parser.error("name files to measure, or --read a saved run")
    if arguments.read:
        _show_saved(arguments.read, tuple(arguments.paces))
        return
    lengths = arguments.prompt, arguments.output
    home = Home(arguments.home, arguments.threads, sum(lengths), _KV_BYTES)
    for model, precision in arguments.files:
        if not home.gguf(model, precision).exists():
            parser.error(
                f"{home.gguf(model, precision)} is not there; python -m bench.peers install makes it"
            )
    library = open_library()
    if library is None:
        parser.error("the compiled kernels, which read memory, are not there: make install")
    set_threads(library, arguments.threads, pinned=False)
    limits, found = Limits(library), []
    for model, precision in arguments.files:
        found.append(measure(home, limits, model, precision, lengths, arguments.rounds))
        _show(found[-1])
        if arguments.save:  # a run that is cut short keeps what it has
            _save(arguments.save, arguments, found)


def _save(path: Path, arguments: argparse.Namespace, found: list[Pairs]) -> None:
    record = {
        "command": "python -m bench.peers.steps",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "prompt": arguments.prompt,
        "output": arguments.output,
        "steps": [asdict(each) for each in found],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
