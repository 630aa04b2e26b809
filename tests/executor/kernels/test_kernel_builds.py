"""`QUINTET_KERNELS`: the instruction sets that are built, and those with less optimisation if GCC knows the native one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

BUILD = """
import platform, runpy, sys
platform.machine = lambda: {machine!r}
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", {made!r}, "--build-temp", {made!r}]
runpy.run_path("setup.py", run_name="__main__")
"""

COMPILER = """#!/bin/sh
# Report the native processor, and record the compile commands.
case "$*" in *-march=native*) {answer};; esac
echo "$@" >> {commands}
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


def build(folder: Path, machine: str, answer: str, kernels: str = "quick") -> list[str]:
    """Return the compile commands, one for each source, with a compiler that reports these flags of the native processor."""
    compiler, commands = folder / "compiler", folder / "commands"
    compiler.write_text(COMPILER.format(answer=answer, commands=commands))
    compiler.chmod(0o755)
    run_setup(folder, machine, compiler, kernels)
    return [line for line in commands.read_text().splitlines() if " -c " in line]


def run_setup(folder: Path, machine: str, compiler: Path, kernels: str = "quick") -> None:
    program = BUILD.format(machine=machine, made=str(folder / "made"))
    environment = os.environ | {"CC": str(compiler), "CXX": str(compiler), "QUINTET_KERNELS": kernels}
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True
    )


def optimised_less(lines: list[str]) -> set[str]:
    return {line.partition("-DQT_ISA=")[2].split()[0] for line in lines if "-Og" in line.split()}


def sets_of(lines: list[str]) -> set[str]:
    return {line.partition("-DQT_ISA=")[2].split()[0] for line in lines if "-DQT_ISA=" in line}


AVX2 = "; ".join(f"echo '  {flag}  [enabled]'" for flag in ("-mavx2", "-mfma", "-mf16c")) + "; exit 0"


NEITHER = "exit 0"
"""The compiler's report for a processor with none of the sets' flags."""


@pytest.mark.parametrize(("answer", "name"), [(AVX2, "avx2"), (NEITHER, "baseline")])
def test_native_builds_the_selected_set(tmp_path: Path, answer: str, name: str) -> None:
    lines = build(tmp_path, "x86_64", answer, "native")
    assert sets_of(lines) == {name} and not optimised_less(lines)
    assert any(f'-DQT_BUILT="{name}"' in line for line in lines)


def test_all_builds_every_set_optimised(tmp_path: Path) -> None:
    lines = build(tmp_path, "x86_64", AVX2, "all")
    assert {"baseline", "avx2", "avx512", "amx"} <= sets_of(lines) and not optimised_less(lines)


def test_other_sets_are_optimised_less(tmp_path: Path) -> None:
    lines = build(tmp_path, "x86_64", AVX2)
    assert {"baseline", "avx512", "avx2_vnni"} <= optimised_less(lines)
    assert not {"avx2", "amx_emulated"} & optimised_less(lines)


def test_all_sets_are_optimised_if_the_native_one_is_unknown(tmp_path: Path) -> None:
    lines = build(tmp_path, "x86_64", "exit 1")
    assert lines and not optimised_less(lines)


def test_all_sets_are_optimised_on_arm(tmp_path: Path) -> None:
    lines = build(tmp_path, "aarch64", "echo '  -mbranch-protection= [enabled]'; exit 0")
    assert any("neon_dot" in line for line in lines) and not optimised_less(lines)


def test_without_a_compiler_the_package_builds_without_kernels(tmp_path: Path) -> None:
    run_setup(tmp_path, "x86_64", tmp_path / "none")
    assert not list(tmp_path.rglob("_host*"))
