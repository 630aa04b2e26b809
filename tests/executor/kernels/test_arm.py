"""Kernels of csrc/cpu on 64-bit ARM: compiled by a cross compiler, run by an emulator.

The program in `arm/` calls the kernels' C functions. It compares results with fp64 sums, and each row's bits between batches and
thread counts. It needs neither Python nor torch. The tests also run it on this processor with the installed library, which
validates the program itself.

QUINTET_ISA selects each instruction set on both machines. The emulator also poses as processors with fewer instruction sets, to
test the automatic choice. Results of integer weights have the same bits everywhere: their digests are equal.

An emulator on x86 cannot show memory reordering of ARM, or speed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.executor.kernels.compiled_checks import INCLUDES, NATIVE, ROOT, compiled, kernel_sources, run
from tests.executor.kernels.instruction_sets import all_of_them, isa

from quintet.executor.backends.cpu.ops.host_library import open_library

CHECKS = ROOT / "tests/executor/kernels/arm"
PARTS = ("linear", "attention", "rows", "sampling")
ARM = ("baseline", "neon_dot", "neon_i8mm", "neon_bf16")
# Contraction is off: otherwise the input numbers of the checks would differ between processors.
CHECK_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", *INCLUDES)
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def checks() -> list[tuple[Path, tuple[str, ...]]]:
    return [(path, CHECK_FLAGS) for path in sorted(CHECKS.glob("*.cpp"))]


def digest_of(output: str, name: str) -> str:
    """Return the digest of integer weights' results in the check's output, for the instruction set ``name``."""
    found = re.search(rf"^{name}: linear: .* digest ([0-9a-f]{{16}})$", output, re.MULTILINE)
    assert found, output
    return found[1]


@pytest.fixture(scope="module")
def program_here() -> Path:
    """The checks with this processor's installed kernels."""
    library = open_library()
    if library is None:
        pytest.skip("the host kernels are not built")
    if shutil.which(NATIVE[0]) is None:
        pytest.skip(f"needs the compiler {NATIVE[0]}")
    return compiled(NATIVE, "here", checks(), Path(library._name))


@pytest.fixture(scope="module")
def digest_here(program_here: Path) -> str:
    """The digest of integer weights' results, which is equal if each product and sum is rounded once."""
    output = run(str(program_here), "linear", env={**os.environ, "QUINTET_ISA": isa()})
    return digest_of(output, isa())


@pytest.mark.whole  # compiles the checks; `test_*_kernels.py` cover the kernels here
@pytest.mark.parametrize("name", all_of_them())
def test_on_this_processor(program_here: Path, digest_here: str, name: str) -> None:
    output = run(str(program_here), env={**os.environ, "QUINTET_ISA": name})
    assert [line.partition(":")[0] for line in output.splitlines()] == [name] * len(PARTS)
    if (platform.machine(), name) != ("x86_64", "baseline"):  # baseline also rounds products
        assert digest_of(output, name) == digest_here, name


@pytest.fixture(scope="module")
def arm_program() -> Path:
    """The checks and the kernels for 64-bit ARM."""
    if platform.machine() in {"aarch64", "arm64"}:
        pytest.skip("this is ARM: test_on_this_processor covers it")
    if shutil.which(CROSS) is None:
        pytest.skip(f"needs the compiler {CROSS} (Debian: g++-aarch64-linux-gnu)")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"needs the emulator {EMULATOR} (Debian: qemu-user)")
    return compiled([CROSS], "arm", kernel_sources("aarch64") + checks(), "-static")


@pytest.mark.whole  # compiles all kernels again
def test_on_arm(arm_program: Path, digest_here: str) -> None:
    def check(job: tuple[str, str]) -> str:
        name, part = job
        return run(EMULATOR, "-cpu", "max", str(arm_program), part, env={**os.environ, "QUINTET_ISA": name})

    jobs = [("baseline", part) for part in PARTS] + [(name, "linear") for name in ARM if name != "baseline"]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        output = "".join(threads.map(check, jobs))
    assert {digest_of(output, name) for name in ARM} == {digest_here}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("processor", "chosen"),
    [("cortex-a72", "baseline"), ("neoverse-n1", "neon_dot"), ("max", "neon_bf16")],
)
def test_the_instruction_set_chosen_on_arm(arm_program: Path, processor: str, chosen: str) -> None:
    """The kernel reports the processor's features. qemu 7.2 has no processor with FEAT_I8MM and without FEAT_BF16."""
    assert run(EMULATOR, "-cpu", processor, str(arm_program), "isa").strip() == chosen
