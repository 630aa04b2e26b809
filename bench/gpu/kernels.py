"""Measure each kernel alone: its bandwidth or multiply rate, as a share of the device's ceiling.

    python -m bench.gpu.kernels [--only attention linear] [--device cpu]

Each kind of kernel has a suite of cases (`SUITES`). A case has several calls of the same size on different memory, so that caches
are as cold as for the next layer of a model. The calls are captured as one graph, so that Python is not measured. On a CPU,
kernels run on the emulator of tests/cuda with toy sizes, to debug the cases.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.arguments import command_parser
from bench.gpu.ceilings import Ceilings, measure_ceilings, report_ceilings
from bench.gpu.figures import Figure, Report, add_report_argument
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.platforms.cuda import open_cuda_device, open_platform
from quintet.wire.config import ExecutorConfig

REPEATS = 20
COLD_BYTES = 256 << 20
"""Memory that the calls of a case should touch: five times the cache of an H200 (50 MB)."""
MAX_CALLS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with one size."""

    name: str
    calls: Sequence[Callable[[], object]]
    """The same work on different memory; can be captured as a graph."""
    num_bytes: float = 0.0
    """Bytes that one call must read and write."""
    flops: float = 0.0
    """FLOPs of one call; 0 if bandwidth is the limit."""
    at_least: float | None = None
    """Target in percent of the ceiling: of the multiply rate with ``flops``, else of the bandwidth."""


Cases = Callable[[Device, bool], Iterator[Case]]
"""Function that yields the cases of a suite; the flag selects toy sizes."""

SUITES = {
    "attention": "bench.gpu.kernel_attention:cases",
    "linear": "bench.gpu.kernel_linear:cases",
    "coded": "bench.gpu.kernel_coded:cases",
    "pointwise": "bench.gpu.kernel_pointwise:cases",
    "sampling": "bench.gpu.kernel_sampling:cases",
}
"""Name of a suite -> module and function of its cases."""


def num_calls(bytes_each: float, toy: bool) -> int:
    """Return the number of calls on different memory that evict each other from the caches."""
    return 2 if toy else max(2, min(MAX_CALLS, round(COLD_BYTES / max(bytes_each, 1))))


def open_device(name: str) -> Device:
    """Return the GPU, or the emulator for a CPU."""
    if name == "cpu":
        from tests.cuda.emulated import EmulatedDevice

        return EmulatedDevice()
    config = ExecutorConfig(device="cuda")
    open_platform(config)
    return open_cuda_device(config)


def time_case(device: Device, case: Case, repeats: int) -> float:
    """Return the seconds of one call: the median over ``repeats`` rounds of all calls."""

    def round_() -> None:
        for call in case.calls:
            call()

    replay = device.capture_timing(round_)
    replay()
    events = [device.record()]
    for _ in range(repeats):
        replay()
        events.append(device.record())
    device.synchronize()
    rounds = [later.elapsed_ms(since=before) for before, later in itertools.pairwise(events)]
    return median(rounds) / 1e3 / len(case.calls)


def report_case(case: Case, elapsed_s: float, ceilings: Ceilings, report: Report) -> None:
    """Report the time of a case, and its rate as a share of the ceiling."""
    report.figure(Figure(case.name, elapsed_s * 1e6, "µs"))
    if case.flops:
        what, rate, ceiling = "matmul rate", case.flops / elapsed_s, ceilings.flops
        remark = f"{rate / 1e12:.4g} TFLOP/s"
    elif case.num_bytes:
        what, rate, ceiling = "bandwidth", case.num_bytes / elapsed_s, ceilings.copy_bytes_per_s
        remark = f"{rate / 1e9:.4g} GB/s"
    else:
        return
    share = 100 * rate / ceiling
    report.figure(Figure(f"{case.name}, of the {what}", share, "%", case.at_least, remark=remark))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, default=list(SUITES), help="run only these suites"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # kernels and libraries chosen at boot
    report, toy = Report(arguments.figures), arguments.device == "cpu"
    device = open_device(arguments.device)
    ceilings = measure_ceilings(device.torch_device)
    report_ceilings(ceilings, report)
    torch.manual_seed(0)
    for name in arguments.only:
        module, _, function = SUITES[name].partition(":")
        cases: Cases = getattr(importlib.import_module(module), function)
        for case in cases(device, toy):
            report_case(case, time_case(device, case, 2 if toy else REPEATS), ceilings, report)


if __name__ == "__main__":
    main()
