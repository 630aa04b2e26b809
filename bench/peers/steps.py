"""What a token and a prompt cost on a machine whose memory changes its pace: Quintet and llama.cpp in turn, pair by pair.

    python -m bench.peers.steps S:q8_0 M:q4_k_m L:q4_k_m [--rounds 12] [--prompt 128] [--output 48] [--save RESULT.json]

Both are up and get one request after the other, and right before and behind each answer memory is read. What an answer is held
against is the other engine's of the same round, and what was read beside it: a virtual machine's memory may be half as
fast for seconds. Medians over the rounds. An answer's time is that from its first token to its last. `bench.peers run` has the
rows of a machine that stays as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

from bench.kernels.limits import Limits
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.engines.llamacpp import LlamaCpp
from bench.peers.engines.quintet import Quintet
from bench.peers.jobs import Job
from bench.peers.token_bytes import token_bytes
from bench.peers.workload import FIRST_ID, GGUF_FILES, Precision
from quintet.executor.ops.host_library import open_library, set_threads

_VOCAB = 100_000
"""Ids below are in every model's vocabulary."""
_KV_BYTES = 1 << 29
_READS = 9
"""Of memory, before and behind each answer: some 70 ms."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine's, of one round."""

    token_ms: float
    """Behind the first."""
    prompt_ms: float
    """To the first token."""
    read_gb_s: float
    """What memory gave beside it."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rounds of one file."""

    file: str
    weights_gb: float
    """What a token reads of it."""
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
    if precision not in GGUF_FILES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no MODEL:FORMAT; formats are {', '.join(GGUF_FILES)}, as in M:q4_k_m"
        )
    return model, precision


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=_file, metavar="MODEL:FORMAT")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "quintet-peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=48, metavar="TOKENS")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every answer as JSON too")
    arguments = parser.parse_args()
    lengths = arguments.prompt, arguments.output
    home = Home(arguments.home, arguments.threads, sum(lengths), _KV_BYTES)
    library = open_library()
    assert library is not None, "the compiled kernels read memory: make install"
    set_threads(library, arguments.threads, pinned=False)
    limits, found = Limits(library), []
    for model, precision in arguments.files:
        pairs = measure(home, limits, model, precision, lengths, arguments.rounds)
        found.append(pairs)
        for name in pairs.answers:
            print(
                f"{pairs.file:<10} {name:<10} a token {pairs.token_ms(name):7.2f} ms, {pairs.share(name):4.0%} of reading; "
                f"a prompt of {arguments.prompt} {pairs.prompt_ms(name):7.0f} ms",
                flush=True,
            )
        tokens, prompts = pairs.times(Quintet().name, LlamaCpp().name)
        reads = [each.read_gb_s for its in pairs.answers.values() for each in its]
        print(
            f"{pairs.file:<10} Quintet is {tokens:.2f} times llama.cpp at tokens, {prompts:.2f} at prompts; "
            f"memory gave {min(reads):.0f} to {max(reads):.0f} GB/s",
            flush=True,
        )
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
