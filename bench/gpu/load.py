"""Compile the kernels for this device if there is a compiler, and load them in each packaged form.

    python -m bench.gpu.load

This is the first row of the checklist; later rows use the compiled kernels. Each form is loaded separately, to test the fallbacks
too. Exit status 1 if kernels cannot be loaded.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import torch

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.kernels import open_device
from bench.gpu.machine import ROOT, environment
from quintet.executor.backends.cuda.kernels.compile import PTX_TARGET, TARGETS
from quintet.executor.backends.cuda.kernels.modules import KINDS, modules
from quintet.wire.errors import ConfigError

SMALL = "norm"
"""Module that is loaded in each form."""


def compile_for_device(report: Report) -> None:
    """Compile for this GPU generation, and PTX for all others; report an error as a remark."""
    major = torch.cuda.get_device_capability()[0]
    targets = sorted({PTX_TARGET, *(target for target in TARGETS if target // 10 == major)})
    command = [
        sys.executable,
        "-m",
        "quintet.executor.backends.cuda.kernels.compile",
        "--only",
        "nvrtc",
        "--targets",
    ]
    begin_s = time.perf_counter()
    ran = subprocess.run(
        [*command, *map(str, targets)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    report.figure(Figure("compiled by NVRTC", time.perf_counter() - begin_s, "s"))
    if ran.returncode:
        report.remark(f"the compilation failed: {ran.stderr.strip()[-500:]}")


def load_each_form(report: Report) -> None:
    """Load one small module as machine code, as PTX, and from source."""
    from quintet.executor.backends.cuda.cupy_device import CupyDevice

    num_loaded = 0
    for kind in KINDS:
        device = CupyDevice(torch.cuda.current_device(), (kind,))
        begin_s = time.perf_counter()
        try:
            device.load(SMALL)
        except ConfigError as error:
            report.remark(f"{SMALL} as {kind}: {error}")
            continue
        num_loaded += 1
        report.figure(Figure(f"{SMALL} loaded as {kind}", time.perf_counter() - begin_s, "s"))
    report.figure(Figure("forms that load", num_loaded, f"of {len(KINDS)}", at_least=len(KINDS)))


def main() -> None:
    """Parse the command line, compile and load."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # kernels and libraries chosen at boot
    report = Report(arguments.figures)
    if arguments.device == "cuda":
        compile_for_device(report)
        load_each_form(report)
    begin_s = time.perf_counter()
    open_device(arguments.device)
    report.figure(Figure(f"{len(modules())} modules opened", time.perf_counter() - begin_s, "s"))


if __name__ == "__main__":
    main()
