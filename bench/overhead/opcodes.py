"""Count the Python opcodes of each process per request and per further step. Other programs do not affect the counts.

    python -m bench.overhead.opcodes [FOLDER …]    FOLDER: another built checkout to count too

The server is that of case (a) of `bench.overhead.run`, with one stream. Steps take 10 ms, so that each token has its own step and
event although tracing slows Python down.

Requests of 2 and of 34 tokens are counted alternately. Opcodes per request are those of the short ones. Opcodes per step are the
difference, divided by the number of further tokens. Both include heartbeats and metrics. Results are medians of the rounds. The C
code of msgspec, ZeroMQ and the HTTP parser has no opcodes.
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
    """Return the opcodes of each role during ``num_requests`` sequential requests."""
    spec = PromptSpec(num_requests, INPUT_LEN, words_per_token=words_per_token(server.target, "null"), seed=1)
    shape = RequestShape("/v1/completions", "null", output_len, ignore_eos=True)
    bodies = [shape.body(item) for item in random_prompts(spec)]
    with server.trace() as results:
        summary = measured(Load(server.target, shape.endpoint, bodies, 1), progress=False)
    if summary.num_completed != num_requests:
        raise RuntimeError(f"only {summary.num_completed} of {num_requests} completed: {summary.failures}")
    return {role: int(number) for role, number in results.items()}


def divide_counts(short: Counts, long: Counts, num_requests: int) -> dict[str, tuple[float, float]]:
    """Return the opcodes of a request of `SHORT` tokens and of each further step, by role."""
    return {
        role: (short[role] / num_requests, (long[role] - short[role]) / num_requests / (LONG - SHORT))
        for role in ROLES
    }


def measure_checkout(
    checkout: Path, model: Path, rounds: int, num_requests: int
) -> dict[str, tuple[float, float]]:
    """Return the medians of `divide_counts` over the rounds, with the server of a checkout."""
    with serve_traced("opcodes", model, FLAGS, checkout) as server:
        count(server, LONG, num_requests)  # warm-up
        results = [
            divide_counts(count(server, SHORT, num_requests), count(server, LONG, num_requests), num_requests)
            for _ in range(rounds)
        ]
    return {
        role: (median(each[role][0] for each in results), median(each[role][1] for each in results))
        for role in ROLES
    }


def main() -> None:
    """Count and print."""
    parser = command_parser(__doc__)
    parser.add_argument("others", type=Path, nargs="*", metavar="FOLDER", help="other built checkouts")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of short and long requests (default: 3)"
    )
    parser.add_argument("--requests", type=int, default=10, help="requests per round (default: 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="null-model-") as folder:
        model = make_null_model(Path(folder))
        for checkout in (THIS, *(other.resolve() for other in options.others)):
            results = measure_checkout(checkout, model, options.rounds, options.requests)
            print(f"{commit_of(checkout)}: opcodes per request of {SHORT} tokens, per further step")
            for role, (request, step) in results.items():
                print(f"    {role:12} {request:8,.0f} {step:8,.0f}")
            request, step = (sum(each[part] for each in results.values()) for part in (0, 1))
            print(f"    {'all':12} {request:8,.0f} {step:8,.0f}", flush=True)


if __name__ == "__main__":
    main()
