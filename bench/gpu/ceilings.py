"""Limits of the device: the ceilings that every other row is compared with.

    python -m bench.gpu.ceilings [--device cpu]

Bandwidth is what torch's copy of 2 GiB moves (bytes read plus bytes written), which is what a roofline of weights and KV is
measured against here; reading alone may be a little faster. The multiply rate is torch's bf16 product of two 8192 x 8192
matrices of normal numbers: zeros would draw less power and let the clock rise.
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
    """Medians."""

    copy_bytes_per_s: float
    flops: float
    """bf16, a multiplication and an addition counted as two."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of copies and products."""

    num_bytes: int
    matrix: int
    repeats: int


def sizes_for(device: torch.device) -> Sizes:
    """Return sizes far beyond a GPU's caches; on a CPU, sizes that take no time."""
    return Sizes(2 << 30, 8192, 60) if device.type == "cuda" else Sizes(1 << 22, 128, 3)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure both."""
    return Ceilings(copy_bytes_per_s(device), matmul_flops(device))


def copy_bytes_per_s(device: torch.device) -> float:
    """Return what torch's copy reads and writes in a second."""
    sizes = sizes_for(device)
    source = torch.ones(sizes.num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.num_bytes / median(seconds(device, lambda: target.copy_(source), sizes.repeats))


def matmul_flops(device: torch.device) -> float:
    """Return the multiply rate of torch's bf16 product of two large square matrices."""
    sizes = sizes_for(device)
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    taken = median(seconds(device, lambda: torch.mm(a, b, out=out), sizes.repeats, warm_up=10))
    return 2 * sizes.matrix**3 / taken


def tell_ceilings(ceilings: Ceilings, report: Report) -> None:
    """Tell them as figures."""
    report.figure(Figure("device copy", ceilings.copy_bytes_per_s / 1e9, "GB/s"))
    report.figure(Figure("bf16 matmul", ceilings.flops / 1e12, "TFLOP/s"))


def tell_others(device: torch.device, report: Report) -> None:
    """Measure and tell what explains other rows, but is no ceiling of them: reading, and copies to and from the host."""
    sizes = sizes_for(device)
    floats = torch.ones(sizes.num_bytes // 4, device=device)
    reading = median(seconds(device, floats.sum, sizes.repeats))
    report.figure(Figure("device read (sum of fp32)", sizes.num_bytes / reading / 1e9, "GB/s"))
    num_bytes = sizes.num_bytes // 8
    host = torch.ones(num_bytes // 4, pin_memory=device.type == "cuda")
    part = floats[: len(host)]
    for name, target, source in (("host to device", part, host), ("device to host", host, part)):
        taken = median(seconds(device, partial(target.copy_, source, non_blocking=True), 5))
        report.figure(Figure(f"{name}, pinned", num_bytes / taken / 1e9, "GB/s"))
    if device.type == "cuda":
        small = torch.ones(8, device=device)
        launching = median(seconds(device, lambda: small.add_(1), 200))
        report.figure(Figure("torch's smallest kernels, back to back", launching * 1e6, "µs"))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    report, device = Report(arguments.figures), torch.device(arguments.device)
    tell_ceilings(measure_ceilings(device), report)
    tell_others(device, report)


if __name__ == "__main__":
    main()
