"""Measure the ceilings of the device's rooflines: memory bandwidth and bf16 multiply rate.

    python -m bench.gpu.ceilings [--device cpu]

Bandwidth is that of torch's copy of 2 GiB: bytes read plus bytes written. Reads alone may be slightly faster. The multiply rate
is that of torch's bf16 product of two 8192 x 8192 matrices. They have normal numbers, since zeros draw less power and raise the
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bench.arguments import command_parser
from bench.gpu.clock import seconds
from bench.gpu.figures import Figure, Report, add_report_argument


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Median rates."""

    copy_bytes_per_s: float
    flops: float
    """bf16 FLOP/s; a multiply-add counts as two."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of copies and products."""

    num_bytes: int
    matrix: int
    repeats: int


def sizes_for(device: torch.device) -> Sizes:
    """Return sizes far beyond a GPU's caches; on a CPU, toy sizes."""
    return Sizes(2 << 30, 8192, 60) if device.type == "cuda" else Sizes(1 << 22, 128, 3)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure bandwidth and multiply rate."""
    return Ceilings(copy_bytes_per_s(device), matmul_flops(device))


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes per second that torch's copy reads and writes."""
    sizes = sizes_for(device)
    source = torch.ones(sizes.num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.num_bytes / median(seconds(device, lambda: target.copy_(source), sizes.repeats))


def matmul_flops(device: torch.device) -> float:
    """Return the FLOP/s of torch's bf16 product of two large square matrices."""
    sizes = sizes_for(device)
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    elapsed_s = median(seconds(device, lambda: torch.mm(a, b, out=out), sizes.repeats, warm_up=10))
    return 2 * sizes.matrix**3 / elapsed_s


def report_ceilings(ceilings: Ceilings, report: Report) -> None:
    """Report the ceilings as figures."""
    report.figure(Figure("device copy", ceilings.copy_bytes_per_s / 1e9, "GB/s"))
    report.figure(Figure("bf16 matmul", ceilings.flops / 1e12, "TFLOP/s"))


def report_other_rates(device: torch.device, report: Report) -> None:
    """Measure and report further rates: reads of device memory, copies to and from the host, kernel launches."""
    sizes = sizes_for(device)
    floats = torch.ones(sizes.num_bytes // 4, device=device)
    read_s = median(seconds(device, floats.sum, sizes.repeats))
    report.figure(Figure("device read (sum of fp32)", sizes.num_bytes / read_s / 1e9, "GB/s"))
    num_bytes = sizes.num_bytes // 8
    host = torch.ones(num_bytes // 4, pin_memory=device.type == "cuda")
    part = floats[: len(host)]
    for name, target, source in (("host to device", part, host), ("device to host", host, part)):
        elapsed_s = median(seconds(device, partial(target.copy_, source, non_blocking=True), 5))
        report.figure(Figure(f"{name}, pinned", num_bytes / elapsed_s / 1e9, "GB/s"))
    if device.type == "cuda":
        small = torch.ones(8, device=device)
        launch_s = median(seconds(device, lambda: small.add_(1), 200))
        report.figure(Figure("back-to-back launches of a small torch kernel", launch_s * 1e6, "µs"))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    report, device = Report(arguments.figures), torch.device(arguments.device)
    report_ceilings(measure_ceilings(device), report)
    report_other_rates(device, report)


if __name__ == "__main__":
    main()
