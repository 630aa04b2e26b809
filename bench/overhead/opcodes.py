"""Count what each process runs in Python for a request, and for each further token: a figure that no other program disturbs.

    python -m bench.overhead.opcodes [FOLDER …]    FOLDER: another checkout, built, to count beside this one

The server is that of case (a) of `bench.overhead.run`, one stream, with a step of a few milliseconds, so that every token is a
step and an event of its own however slow counting makes Python. Requests of 2 tokens and requests of 34 are counted in turns;
what the longer ones run more, by the tokens that they have more, is a further step's, and what is left of the short ones, a
request's. Heartbeats and figures are in both. Medians of the rounds. What msgspec, ZeroMQ and the HTTP parser do is not Python.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench.arguments import command_parser
from bench.counting.control import ROLES, TracedServer, serve_traced
from bench.null_model import make_null_model
from bench.overhead.pairs import THIS, commit_of
from bench.overhead.run import INPUT_LEN
from quintet.deploy.cli.bench import measured, words_per_token
from quintet.deploy.tools.load_client.load import Load
from quintet.deploy.tools.load_client.workload import PromptSpec, RequestShape, random_prompts

FLAGS = ("--served-model-name", "null", "--executor", "mock", "--step-ms", "10")
SHORT, LONG = 2, 34

Counts = Mapping[str, int]


def count(server: TracedServer, output_len: int, num_requests: int) -> Counts:
    """Return what each role runs while so many requests come one after the other."""
    spec = PromptSpec(num_requests, INPUT_LEN, words_per_token=words_per_token(server.target, "null"), seed=1)
    shape = RequestShape("/v1/completions", "null", output_len, ignore_eos=True)
    bodies = [shape.body(item) for item in random_prompts(spec)]
    with server.trace() as results:
        summary = measured(Load(server.target, shape.endpoint, bodies, 1), progress=False)
    if summary.num_completed != num_requests:
        raise RuntimeError(f"only {summary.num_completed} of {num_requests} completed: {summary.failures}")
    return {role: int(number) for role, number in results.items()}


def parts(short: Counts, long: Counts, num_requests: int) -> dict[str, tuple[float, float]]:
    """Return of each role what a request of `SHORT` tokens runs, and what each further step."""
    return {
        role: (short[role] / num_requests, (long[role] - short[role]) / num_requests / (LONG - SHORT))
        for role in ROLES
    }


def of_checkout(
    checkout: Path, model: Path, rounds: int, num_requests: int
) -> dict[str, tuple[float, float]]:
    """Return `parts` of a checkout's server, medians of the rounds."""
    with serve_traced("opcodes", model, FLAGS, checkout) as server:
        count(server, LONG, num_requests)  # what is only done once
        found = [
            parts(count(server, SHORT, num_requests), count(server, LONG, num_requests), num_requests)
            for _ in range(rounds)
        ]
    return {
        role: (median(each[role][0] for each in found), median(each[role][1] for each in found))
        for role in ROLES
    }


def main() -> None:
    """Count and print."""
    parser = command_parser(__doc__)
    parser.add_argument("others", type=Path, nargs="*", metavar="FOLDER", help="other checkouts")
    parser.add_argument("--rounds", type=int, default=3, help="of short and of long requests (default: 3)")
    parser.add_argument("--requests", type=int, default=10, help="in each (default: 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="null-model-") as folder:
        model = make_null_model(Path(folder))
        for checkout in (THIS, *(other.resolve() for other in options.others)):
            found = of_checkout(checkout, model, options.rounds, options.requests)
            print(f"{commit_of(checkout)}: opcodes of a request of {SHORT} tokens, of each further step")
            for role, (request, step) in found.items():
                print(f"    {role:12} {request:8,.0f} {step:8,.0f}")
            request, step = (sum(each[part] for each in found.values()) for part in (0, 1))
            print(f"    {'all':12} {request:8,.0f} {step:8,.0f}", flush=True)


if __name__ == "__main__":
    main()
