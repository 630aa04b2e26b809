"""The kernels of csrc/cpu on 64-bit ARM, without such a machine: compiled by a cross compiler, run by an emulator.

``tests/executor/arm`` is a program that calls the kernels' C functions and compares what they compute with sums in fp64 and
rows' bits between batches and numbers of threads; it needs neither Python nor torch where it runs. Here it is also run on this
processor with the library as it is installed, for every instruction set: that what it asks for is right, is shown there.

What an emulator on x86 cannot show: memory accesses that only ARM reorders, and any time.
"""

from __future__ import annotations

import ast
import getpass
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.executor.instruction_sets import isa, others

from quintet.executor.ops.host_library import open_library

ROOT = Path(__file__).parents[2]
KERNELS, CHECKS = ROOT / "csrc/cpu", ROOT / "tests/executor/arm"
PARTS = ("linear", "attention", "rows", "sampling")
CHECK_FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", f"-I{KERNELS}")
CROSS, EMULATOR, NATIVE = "aarch64-linux-gnu-g++", "qemu-aarch64", os.environ.get("CXX", "g++")


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Return what a command writes, which must succeed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def kernel_flags() -> tuple[str, ...]:
    """What setup.py compiles kernels with, but for a processor of which nothing is known."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS":
            return (*ast.literal_eval(node.value), "-DQT_ISA=baseline", f"-I{KERNELS}")
    raise AssertionError("setup.py has no FLAGS")


def compiled(
    compiler: str, name: str, sources: list[tuple[Path, tuple[str, ...]]], *link: str | Path
) -> Path:
    """Return the program of these sources, compiled unless one of the same content lies there.

    link: options and libraries.
    """
    content = hashlib.sha256(repr((run(compiler, "--version"), sources, link)).encode())
    libraries = [each for each in link if isinstance(each, Path)]
    for path in sorted([*KERNELS.rglob("*.[ch]pp"), *CHECKS.glob("*.[ch]pp"), *libraries]):
        content.update(path.name.encode() + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"quintet-arm-{getpass.getuser()}"
    target = folder / f"{name}-{content.hexdigest()[:16]}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:

        def compile_one(job: tuple[Path, tuple[str, ...]]) -> str:
            source, flags = job
            built = str(Path(temporary) / f"{source.parent.name}-{source.stem}.o")
            run(compiler, *flags, "-c", str(source), "-o", built)
            return built

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, sources))
        program = Path(temporary) / name
        run(compiler, *objects, *map(str, link), "-pthread", "-o", str(program))
        program.replace(target)  # whole or not at all, whoever else compiles the same
    return target


def checks() -> list[tuple[Path, tuple[str, ...]]]:
    return [(path, CHECK_FLAGS) for path in sorted(CHECKS.glob("*.cpp"))]


@pytest.mark.skipif(shutil.which(NATIVE) is None, reason=f"needs the compiler {NATIVE}")
@pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")
def test_on_this_processor() -> None:
    library = open_library()
    assert library is not None
    program = compiled(NATIVE, "here", checks(), Path(library._name))
    for name in (*others(), isa()):
        said = run(str(program), env={**os.environ, "QUINTET_ISA": name})
        assert [line.partition(":")[0] for line in said.splitlines()] == [name] * len(PARTS)


@pytest.mark.skipif(
    platform.machine() in {"aarch64", "arm64"}, reason="this is ARM: the other test is enough"
)
@pytest.mark.skipif(
    shutil.which(CROSS) is None, reason=f"needs the compiler {CROSS} (Debian: g++-aarch64-linux-gnu)"
)
@pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason=f"needs the emulator {EMULATOR} (Debian: qemu-user)"
)
def test_on_arm() -> None:
    named = KERNELS / "library.cpp"  # says to Python what the library was built from: setup.py alone knows
    kernels = sorted({*KERNELS.glob("*.cpp"), *KERNELS.glob("kernels/*.cpp")} - {named})
    sources = [(path, kernel_flags()) for path in kernels] + checks()
    program = compiled(CROSS, "arm", sources, "-static")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda part: run(EMULATOR, str(program), part), PARTS))
