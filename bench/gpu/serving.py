"""Measure the server end to end over HTTP, with ShareGPT-like lengths and rates up to saturation.

    python -m bench.gpu.serving [--device cpu]

The in-process engine (`bench.gpu.in_process`) runs first, with all requests at once. Then `quintet serve` has the same model and
settings. With all requests at once, it must reach 95 % of that throughput; then come Poisson arrivals at shares of it. Client and
server share the machine. The model has random weights; requests are greedy, without EOS. Lengths: `bench.gpu.workload`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.in_process import limits_for, run_in_process
from bench.gpu.shapes import BLOCK_SIZE, shape_for
from bench.gpu.workload import Work, WorkloadRequest, requests
from bench.null_model import write_tokenizer
from bench.overhead.server import Server, serve
from quintet.deploy.tools.load_client.load import Load, run_load
from quintet.deploy.tools.load_client.report import Spread, Summary, summarise
from quintet.deploy.tools.load_client.workload import Item, RequestShape, poisson_arrivals

SERVED_NAME = "bench"
SHARES = (0.5, 0.8, 1.0)
"""Arrival rates, as shares of the in-process engine's requests per second."""
RATE_S = 8.0
"""Approximate duration of the arrivals at each rate."""
IDLE_TIMEOUT_S = 90.0
"""Timeout for the idle tasks of a server after it is ready."""


def run_requests(server: Server, workload: list[WorkloadRequest], rate: float | None) -> Summary:
    """Send the requests, all at once or with Poisson arrivals; return the client's figures."""
    shape = RequestShape("/v1/completions", SERVED_NAME, 16, ignore_eos=True)
    bodies = [shape.body(Item(request.prompt, output_len=request.output_len)) for request in workload]
    arrivals = None if rate is None else poisson_arrivals(len(bodies), rate, seed=0)
    load = Load(server.target, shape.endpoint, bodies, len(bodies), arrivals)
    summary = summarise(run_load(load))
    if summary.num_completed != len(workload):
        raise SystemExit(
            f"only {summary.num_completed} of {len(workload)} requests completed: {summary.failures}"
        )
    return summary


def wait_until_idle(server: Server) -> None:
    """Wait until the executor has finished its idle tasks, such as graph captures."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    spent = server.cpu_seconds()["executor"]
    while time.monotonic() < deadline:
        time.sleep(1.0)
        before, spent = spent, server.cpu_seconds()["executor"]
        if spent - before < 0.1:
            return
    raise SystemExit(f"the executor is still busy after {IDLE_TIMEOUT_S:.0f} s without requests")


def report_load(name: str, summary: Summary, report: Report) -> None:
    """Report the figures of a load."""

    def report_times(metric: str, times: Spread | None) -> None:
        if times is not None:
            report.figure(Figure(f"{name}: {metric} p50", times.p50, "ms"))
            report.figure(Figure(f"{name}: {metric} p99", times.p99, "ms"))

    report.figure(Figure(f"{name}: output", summary.output_tokens_per_s, "tokens/s"))
    report_times("time to first token", summary.ttft_ms)
    report_times("per output token", summary.time_per_output_token_ms)


def write_model(folder: Path, device: str) -> None:
    """Write config and tokenizer of the measured shape; the server uses random weights."""
    shape = shape_for(device)
    (folder / "config.json").write_text(json.dumps(shape.hf_config))
    write_tokenizer(folder, shape.vocab_size, shape.max_len)


def server_flags(device: str, served_as: str = SERVED_NAME) -> list[str]:
    """Return flags for a server with the settings of the in-process engine."""
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
    """Measure the in-process engine, then the server."""
    vocab_size = shape_for(device).vocab_size

    def workload(count: int, seed: int) -> list[WorkloadRequest]:
        return requests(Work.CONVERSATION, device, count, vocab_size, seed)

    in_process = run_in_process(Work.CONVERSATION, device, num)
    report.figure(Figure("in-process engine: output", in_process.tokens, "tokens/s"))
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), device)
        with serve(scratch, [*server_flags(device), "--no-enable-prefix-caching"]) as server:
            wait_until_idle(server)
            run_requests(server, workload(max(4, num // 8), 1), None)  # warm-up
            at_once = run_requests(server, workload(num, 0), None)
            report_load("HTTP, all at once", at_once, report)
            share = 100 * at_once.output_tokens_per_s / in_process.tokens
            report.figure(Figure("HTTP, all at once, of the in-process engine", share, "%", 95.0))
            for part in SHARES:
                rate = part * in_process.requests
                count = min(num, max(4, round(rate * RATE_S)))
                summary = run_requests(server, workload(count, 2), rate)
                report_load(f"HTTP, {rate:.1f} requests/s ({part:.0%})", summary, report)


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, help="number of requests (default: 1,000; on a CPU 24)")
    add_report_argument(parser)
    arguments = parser.parse_args()
    num = arguments.requests or (1000 if arguments.device == "cuda" else 24)
    measure(arguments.device, num, Report(arguments.figures))


if __name__ == "__main__":
    main()
