"""End to end over HTTP: conversation-like lengths at rates to saturation, beside the engine alone on the same requests.

    python -m bench.gpu.serving [--device cpu]

First the engine alone (`bench.gpu.alone`), everything asked at once. Then `quintet serve` with the same model and settings:
everything asked at once, which must reach 95 % of that, and Poisson arrivals at shares of it. Client and server share the
machine. Random weights, greedy, no end of sequence; the lengths are in `bench.gpu.workload`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.alone import limits_for, measure_alone_elsewhere
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.shapes import BLOCK_SIZE, shape_for
from bench.gpu.workload import Asked, Work, requests
from bench.null_model import write_tokenizer
from bench.overhead.server import Server, serve
from quintet.deploy.tools.load_client.load import Load, run_load
from quintet.deploy.tools.load_client.report import Spread, Summary, summarise
from quintet.deploy.tools.load_client.workload import Item, RequestShape, poisson_arrivals

SERVED_AS = "bench"
SHARES = (0.5, 0.8, 1.0)
"""Arrival rates, as shares of what the engine alone finishes."""
RATE_S = 8.0
"""About how long requests arrive at each rate."""
SETTLE_S = 90.0
"""Limit on the idle tasks of a server after it is ready."""


def play(server: Server, asked: list[Asked], rate: float | None) -> Summary:
    """Send the requests, all at once or at a rate, and return what the client saw."""
    shape = RequestShape("/v1/completions", SERVED_AS, 16, ignore_eos=True)
    bodies = [shape.body(Item(one.prompt, output_len=one.output_len)) for one in asked]
    arrivals = None if rate is None else poisson_arrivals(len(bodies), rate, seed=0)
    load = Load(server.target, shape.endpoint, bodies, len(bodies), arrivals)
    summary = summarise(run_load(load))
    if summary.num_completed != len(asked):
        raise SystemExit(
            f"only {summary.num_completed} of {len(asked)} requests ended well: {summary.failures}"
        )
    return summary


def settle(server: Server) -> None:
    """Wait until the executor is idle: without requests it captures graphs."""
    deadline = time.monotonic() + SETTLE_S
    spent = server.cpu_seconds()["executor"]
    while time.monotonic() < deadline:
        time.sleep(1.0)
        before, spent = spent, server.cpu_seconds()["executor"]
        if spent - before < 0.1:
            return
    raise SystemExit(f"the executor is still busy after {SETTLE_S:.0f} s without requests")


def tell(name: str, summary: Summary, report: Report) -> None:
    """Tell what a load saw."""

    def tell_times(what: str, times: Spread | None) -> None:
        if times is not None:
            report.figure(Figure(f"{name}: {what} p50", times.p50, "ms"))
            report.figure(Figure(f"{name}: {what} p99", times.p99, "ms"))

    report.figure(Figure(f"{name}: output", summary.output_tokens_per_s, "tokens/s"))
    tell_times("time to first token", summary.ttft_ms)
    tell_times("per output token", summary.time_per_output_token_ms)


def write_model(folder: Path, device: str) -> None:
    """Write the config and a tokenizer of the shape that is measured; a server makes up the weights."""
    shape = shape_for(device)
    (folder / "config.json").write_text(json.dumps(shape.hf_config))
    write_tokenizer(folder, shape.vocab_size, shape.max_len)


def server_flags(device: str, served_as: str = SERVED_AS) -> list[str]:
    """Return the flags that give a server what the engine alone has."""
    limits = limits_for(device)
    flags = {
        "served-model-name": served_as,
        "load-format": "dummy",
        "dtype": "bfloat16",
        "device": device,
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "max-model-len": limits.max_model_len,
        "block-size": BLOCK_SIZE,
    }
    if device == "cpu":
        flags |= {"kv-cache-memory": "4MiB", "threads": 1}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def measure(device: str, num: int, report: Report) -> None:
    """Measure the engine alone, then the server."""
    vocab_size = shape_for(device).vocab_size

    def asked(count: int, seed: int) -> list[Asked]:
        return requests(Work.CONVERSATION, device, count, vocab_size, seed)

    alone = measure_alone_elsewhere(Work.CONVERSATION, device, num)
    report.figure(Figure("engine alone: output", alone.tokens, "tokens/s"))
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), device)
        with serve(scratch, [*server_flags(device), "--no-enable-prefix-caching"]) as server:
            settle(server)
            play(server, asked(max(4, num // 8), 1), None)  # warms up
            at_once = play(server, asked(num, 0), None)
            tell("HTTP, all at once", at_once, report)
            share = 100 * at_once.output_tokens_per_s / alone.tokens
            report.figure(Figure("HTTP, all at once, of the engine alone", share, "%", 95.0))
            for part in SHARES:
                rate = part * alone.requests
                count = min(num, max(4, round(rate * RATE_S)))
                summary = play(server, asked(count, 2), rate)
                tell(f"HTTP, {rate:.1f} requests/s ({part:.0%})", summary, report)


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, help="how many (default: 1,000; on a CPU 24)")
    add_report_argument(parser)
    arguments = parser.parse_args()
    num = arguments.requests or (1000 if arguments.device == "cuda" else 24)
    measure(arguments.device, num, Report(arguments.figures))


if __name__ == "__main__":
    main()
