"""Launch each kernel family once and compare it with float64: the first test on a GPU.

    python -m bench.gpu.smoke [--only linear attention] [--device cpu]

Order: load all modules, run the self-test kernels, capture ``torch.mm`` three times, then run the families. A line is printed and
flushed before each launch, so that the last line names the kernel of a crash or a hang. After a kernel's first launch come its
registers and local memory per thread, and its blocks per multiprocessor. A failed family does not end the test. Exit status 1 if
one failed.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import cast

import torch

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.kernels import open_device
from bench.gpu.smoke_families import FAMILIES, Family, random_bf16
from quintet.executor.backends.cuda.device import Argument, Device, Kernel, Size
from quintet.executor.backends.cuda.kernels.modules import modules


class LoggedDevice:
    """A device that prints each launch before it begins, synchronizes, and prints the kernel's resources."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: set[Kernel] = set()
        self._is_capturing = False

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """As in `Device`."""
        words = f"{kernel.module}.{kernel.name} grid {grid} block {block} shared {shared_bytes}"
        print(f"  launch {words}", flush=True)
        self._device.launch(kernel, grid, block, args, shared_bytes)
        if not self._is_capturing:  # not allowed during a capture
            self._device.synchronize()
        usage = getattr(self._device, "usage", None)
        if usage is not None and kernel not in self._seen:
            resources = usage(kernel, block[0] * block[1] * block[2], shared_bytes)
            print(
                f"    {resources.registers} registers, {resources.local_bytes} local bytes,"
                f" {resources.blocks_per_multiprocessor} blocks per multiprocessor",
                flush=True,
            )
        self._seen.add(kernel)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As in `Device`."""
        self._is_capturing = True
        try:
            return self._device.capture(run)
        finally:
            self._is_capturing = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)


def self_test(device: Device) -> None:
    """Launch a kernel with known results: atomics of all threads of all blocks."""
    where = device.torch_device
    count, highest = (torch.zeros(1, dtype=torch.int32, device=where) for _ in range(2))
    total = torch.zeros(1, device=where)
    device.launch(
        Kernel("selftest", "selftest_atomics", "ppp"), (3, 1, 1), (64, 1, 1), (count, highest, total)
    )
    device.synchronize()
    found = (int(count), int(highest), float(total))
    assert found == (192, 191, 96.0), f"selftest_atomics: {found}, expected (192, 191, 96.0)"


def capture_again(device: Device) -> None:
    """Capture a cuBLAS product and drop its graph, three times with each kind of memory pool."""
    x = random_bf16(device, 64, 64)
    out = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, x, out=out)

    for capture in (device.capture, device.capture_timing):
        for _ in range(3):
            product()
            replay = capture(product)
            replay()
            device.synchronize()
            del replay
            gc.collect()


def run_part(name: str, run: Callable[[], object], report: Report) -> bool:
    """Run one part; report its time or its error. Return True if it succeeded."""
    print(f"{name} ...", flush=True)
    begin_s = time.perf_counter()
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the other families are tested too
        traceback.print_exc()
        report.remark(f"smoke: {name} FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return False
    print(f"{name}: {time.perf_counter() - begin_s:.2f} s", flush=True)
    return True


def is_device_lost(device: Device) -> bool:
    """Return True if a kernel error made the device unusable for this process."""
    try:
        device.synchronize()
    except Exception:  # noqa: BLE001 - a lost device raises errors of several types
        return True
    return False


def try_family(family: Family, device: Device, report: Report) -> None:
    """Run a family; raise `AssertionError` if its error exceeds the bound."""
    error, bound = family.run(device)
    report.figure(Figure(f"smoke {family.name}: largest error", error, "", at_most=bound))
    assert error <= bound, f"error {error:.3g} relative to float64; allowed {bound:.3g}"


def main() -> int:
    """Parse the command line and run; return 1 if a part failed."""
    parser = command_parser(__doc__)
    names = [family.name for family in FAMILIES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these families")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = Report(arguments.figures)
    begin_s = time.perf_counter()
    opened = open_device(arguments.device)
    report.figure(Figure(f"smoke: {len(modules())} modules opened", time.perf_counter() - begin_s, "s"))
    device = cast(Device, LoggedDevice(opened))
    results = [
        run_part("self-test", lambda: self_test(device), report),
        run_part("capture again", lambda: capture_again(device), report),
    ]
    chosen = [family for family in FAMILIES if family.name in arguments.only]
    for index, family in enumerate(chosen):
        results.append(
            run_part(family.name, lambda family=family: try_family(family, device, report), report)  # type: ignore[misc]
        )
        if not results[-1] and is_device_lost(opened) and chosen[index + 1 :]:
            print(
                "the device is unusable in this process; the other families run in a new process", flush=True
            )
            others = [each.name for each in chosen[index + 1 :]]
            figure_arguments = ["--figures", str(arguments.figures)] if arguments.figures else []
            subprocess.run(
                [sys.executable, "-m", "bench.gpu.smoke", "--only", *others, *figure_arguments], check=False
            )
            break
    print(f"smoke: {sum(results)} of {len(results)} parts passed", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
