"""What a token and a prompt cost where others use the machine: Quintet and llama.cpp in turn, the least disturbed of some.

    python -m bench.peers.steps q8_0 q4_k_m [--rounds 4] [--prompt 128] [--save RESULT.json]

Both are up and get one request after the other. Of an engine's answers the fastest counts, from its first token to its last,
and of prompts the fastest: what others take makes them longer, never shorter. `bench.peers run` has the figures of a machine
that is left alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import cast, get_args

from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.engines.llamacpp import LlamaCpp
from bench.peers.engines.quintet import Quintet
from bench.peers.jobs import Job
from bench.peers.workload import Precision

_OUTPUT = 64
_KV_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Steps:
    """One engine's, of one file."""

    file: str
    engine: str
    token_ms: float
    """Of the fastest answer, behind its first token."""
    median_ms: float
    """Between two tokens, of all answers."""
    prompt_ms: float
    """The fastest, to the first token."""


def measure(home: Home, precision: Precision, prompt_len: int, rounds: int) -> list[Steps]:
    """Start both with S in a format, and ask them in turn."""
    setup, running = Setup("S", precision, "serve"), dict[str, Running]()
    gaps: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    try:
        for engine in (Quintet(), LlamaCpp()):
            running[engine.name] = engine.start(home, setup)
        for i in range(rounds):
            prompt = Random(i).choices(range(300, 150_000), k=prompt_len)
            for name, each in running.items():
                (served,) = each.run(Job([prompt], [_OUTPUT], 1, prompt_len + _OUTPUT)).served
                times = served.token_times_s
                firsts.setdefault(name, []).append(times[0] - served.start_s)
                means.setdefault(name, []).append((times[-1] - times[0]) / (len(times) - 1))
                gaps.setdefault(name, []).extend(later - sooner for sooner, later in pairwise(times))
    finally:
        for each in running.values():
            each.stop()
    found = []
    for name, its in gaps.items():
        numbers = (1000 * value for value in (min(means[name]), median(its), min(firsts[name])))
        found.append(Steps(precision, name, *(round(number, 2) for number in numbers)))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("precisions", nargs="+", choices=get_args(Precision))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "quintet-peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON too")
    arguments = parser.parse_args()
    home = Home(arguments.home, arguments.threads, arguments.prompt + _OUTPUT, _KV_BYTES)
    found = []
    for precision in arguments.precisions:
        for each in measure(home, cast(Precision, precision), arguments.prompt, arguments.rounds):
            found.append(each)
            print(
                f"S {each.file} {each.engine:<10} a token {each.token_ms:6.2f} ms (median {each.median_ms:.2f}), "
                f"a prompt of {arguments.prompt} {each.prompt_ms:.0f} ms",
                flush=True,
            )
        if arguments.save:  # a run that is cut short keeps what it has
            _save(arguments.save, arguments, found)


def _save(path: Path, arguments: argparse.Namespace, found: list[Steps]) -> None:
    record = {
        "command": "python -m bench.peers.steps",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "prompt": arguments.prompt,
        "rounds": arguments.rounds,
        "steps": [asdict(each) for each in found],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
