"""Measure the device's idle time between decode steps of a real server at batch 1 and 256, and write Chrome traces.

    python -m bench.gpu.timeline [--traces DIR] [--device cpu]

Starts `quintet serve --trace`, sends concurrent streams, and reads the device's busy and idle time from the executor's metrics,
which use events on the device. The spans of all processes are in ``DIR/gpu-step-timeline-<batch>.trace.json``, for
https://ui.perfetto.dev or chrome://tracing, and in a table.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.serving import server_flags, wait_until_idle, write_model
from bench.overhead.server import Server, serve
from bench.timeline.__main__ import SERVED_NAME, decode_steps_of, send_load
from quintet.deploy.tools.step_account import account, bars_of, read_folder
from quintet.process.trace import merge

OUTPUT_LEN = 200
GAP = "executor_device_gap_seconds"
COMPUTE = "executor_compute_seconds"


def gap_share(server: Server, before: tuple[float, float], computed_before: float) -> float | None:
    """Return the device's share of idle time since ``before``; None if it was not measured."""
    gap, count = server.histogram(GAP)
    compute, _ = server.histogram(COMPUTE)
    idle, busy = gap - before[0], compute - computed_before
    return idle / (idle + busy) if count > before[1] and idle + busy > 0 else None


def measure(device: str, streams: int, traces: Path, report: Report) -> None:
    """Trace a server with ``streams`` concurrent streams, and report its figures."""
    output_len = OUTPUT_LEN if device == "cuda" else 24
    with tempfile.TemporaryDirectory() as scratch:
        model, spans = Path(scratch) / "model", Path(scratch) / "spans"
        model.mkdir()
        write_model(model, device)
        with serve(model, [*server_flags(device, SERVED_NAME), "--trace", str(spans)]) as server:
            wait_until_idle(server)
            send_load(server, streams, 16, output_len, seed=1)  # warm-up
            before, (computed, _) = server.histogram(GAP), server.histogram(COMPUTE)
            send_load(server, streams, 16, output_len, seed=2)
            share = gap_share(server, before, computed)
        trace = merge(read_folder(spans))
    traces.mkdir(parents=True, exist_ok=True)
    target = traces / f"gpu-step-timeline-{streams}.trace.json"
    target.write_bytes(msgspec.json.encode(trace))
    bars = bars_of(trace)
    step_account = account(bars, decode_steps_of(bars, output_len))
    report.figure(Figure(f"server step, batch {streams}", step_account.step_ms, "ms"))
    if share is not None:
        report.figure(Figure(f"server step, batch {streams}, device idle", 100 * share, "%", at_most=2.0))
    report.remark(f"batch {streams}: Chrome trace {target}\n{step_account.text()}")


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--traces", type=Path, default=Path("build/gpu-check"), help="folder (default: %(default)s)"
    )
    add_report_argument(parser)
    arguments = parser.parse_args()
    report = Report(arguments.figures)
    for streams in (1, 256) if arguments.device == "cuda" else (1, 4):
        measure(arguments.device, streams, arguments.traces, report)


if __name__ == "__main__":
    main()
