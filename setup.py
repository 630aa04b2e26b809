"""Builds the host kernels of csrc/cpu; pyproject.toml contains all other package settings.

Sources in ``csrc/cpu/kernels`` are compiled once per instruction set, each in its own namespace; other sources once. The library
has a plain C ABI and is loaded with ctypes (quintet.executor.backends.cpu.ops.host_library), so neither Python headers nor torch
are needed. If compilation fails, the package is installed without it and uses torch.

The environment variable QUINTET_KERNELS selects the instruction sets:

    all      all, optimised; used for wheels, and the default
    native   those selected on this processor; a quarter of the build time
    quick    all, but those not selected on this processor with less optimisation; for tests
    none     none; torch is used
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc/cpu")
NAMES = runpy.run_path("src/quintet/executor/backends/cpu/ops/host_sources.py")

NAMED = ("library.cpp", "dispatch.cpp")
"""Contain the source hash and the list of built instruction sets, so they are always compiled."""

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")
ALL = ("*",)
INTEGERS = ("linear_integer", "limits")
ALL_BUT_INTEGERS = ("[!l]*", "limits", "linear_[!i]*", "logprobs")
PAIRS = ("linear_float", "limits")
MATRICES = ("linear_matrix*", "attention", "limits", "matrix_check")
# Instruction set -> compiler flags, and patterns of kernel sources compiled for it; for other sources its parent set is used
# (csrc/cpu/runtime/dispatch.hpp).
BASELINE = {"baseline": ((), ALL)}
INSTRUCTION_SETS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "x86_64": {
        "avx2": (AVX2, ALL),
        "avx2_vnni": ((*AVX2, "-mavxvnni"), INTEGERS),
        "avx512": (AVX512, ALL),
        "avx512_vnni": ((*AVX512, "-mavx512vnni"), INTEGERS),
        "avx512_bf16": (AVX512_BF16, ALL_BUT_INTEGERS),
        "amx_emulated": ((*AVX512_BF16, "-DQT_AMX_EMULATED"), MATRICES),
        "amx": ((*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), MATRICES),
    },
    "aarch64": {
        "neon_dot": (("-march=armv8.2-a+dotprod",), INTEGERS),
        "neon_i8mm": (("-march=armv8.2-a+dotprod+i8mm",), INTEGERS),
        # fp16: GCC 12 writes a constant of bf16 numbers with an instruction of it.
        "neon_bf16": (("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",), PAIRS),
    },
}
LONGEST = ("linear_integer", "attention", "linear_float", "linear_matrix")
"""Slowest sources, compiled first for load balance."""
MACHINES = {"AMD64": "x86_64"}  # other systems' names
KERNELS = os.environ.get("QUINTET_KERNELS", "all")
if KERNELS not in {"all", "native", "quick", "none"}:
    sys.exit(f"QUINTET_KERNELS is {KERNELS!r}; it must be all, native, quick or none")
MATRIX_UNIT = "amx"  # the operating system may refuse it at run time
EMULATED = "amx_emulated"  # for tests only, but too slow with less optimisation

FLAGS = (
    "-std=c++20",
    "-O3",
    "-g0",  # overrides Python's flags: debug information is large
    "-ffp-contract=off",  # template instances must round equally; fused operations are explicit
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    # GCC 12 warns about its own AVX-512 header, and about passing vectors.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-Wno-unused-function",  # simd.hpp has helpers that not all sources use
    "-Werror=frame-larger-than=131072",  # threads may have small stacks (csrc/cpu/runtime/thread_memory.hpp)
)


Sets = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def native_sets(sets: Sets) -> set[tuple[str, Path]] | None:
    """Return the best instruction set of each kernel source for this processor, according to ``g++ -march=native``.

    None without GCC for x86.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, "-march=native", "-Q", "--help=target"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    native = {line.split()[0] for line in output.splitlines() if line.strip().endswith("[enabled]")}
    best = {
        path: name
        for name, (flags, sources) in sets.items()
        if name != EMULATED and native.issuperset(flags)
        for pattern in sources
        for path in (SOURCES / "kernels").rglob(f"{pattern}.cpp")
    }
    return {(name, path) for path, name in best.items()}


def grants_matrix_unit() -> bool:
    """Return whether the operating system allows AMX tiles (Linux 5.16, arch/x86/xstate.rst)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):
        return False


def selected_sets(sets: Sets) -> set[tuple[str, Path]] | None:
    """Return `native_sets`, without the matrix unit if the operating system refuses it."""
    return native_sets(
        sets
        if grants_matrix_unit()
        else {name: kernels for name, kernels in sets.items() if name != MATRIX_UNIT}
    )


def complete_sets(sets: Sets, chosen: set[tuple[str, Path]]) -> list[str]:
    """Return the sets with all kernels built, inherited ones included: the best one, as its parents have other kernels only."""
    return [max((name for name, _ in chosen), key=list(sets).index)]


class Progress:
    """Progress of compilation: one updated line on a terminal, else a line per 10 %."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def step(self, name: str) -> None:
        """Count one compiled source."""
        with self._lock:
            self._done += 1
            line = f"  kernels: {self._done} of {self._total} sources compiled"
            if sys.stderr.isatty():
                end = "\n" if self._done == self._total else ""
                print(f"\r{line} ({name})".ljust(78)[:78], end=end, file=sys.stderr, flush=True)
            elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
                print(line, file=sys.stderr, flush=True)


class BuildKernels(build_ext):
    """Compiles the kernel sources for all instruction sets in parallel."""

    def build_extension(self, ext: Extension) -> None:
        """Build the library (setuptools hook)."""
        named = (
            *FLAGS,
            f'-DQT_INTERFACE="{NAMES["interface_of"](SOURCES)}"',
            f'-DQT_SOURCES="{NAMES["sources_of"](SOURCES)}"',
        )
        machine = MACHINES.get(platform.machine(), platform.machine())
        sets = BASELINE | INSTRUCTION_SETS.get(machine, {})
        best = selected_sets(sets) if machine == "x86_64" and KERNELS != "all" else None
        built = list(sets) if best is None or KERNELS == "quick" else complete_sets(sets, best)
        named = (*named, f'-DQT_BUILT="{" ".join(built)}"')
        jobs = [
            (path, Path(self.build_temp) / "once", named if path.name in NAMED else FLAGS)
            for path in sorted(SOURCES.rglob("*.cpp"))
            if "kernels" not in path.parts
        ]
        headers = list(SOURCES.rglob("*.hpp"))
        include_dirs = sorted({str(path.parent) for path in headers} | {str(SOURCES)})
        for name, (flags, sources) in sets.items():
            for path in sorted(
                {path for pattern in sources for path in (SOURCES / "kernels").rglob(f"{pattern}.cpp")}
            ):
                is_chosen = best is None or (name, path) in best
                if not is_chosen and KERNELS == "native":
                    continue
                less = () if is_chosen or name == EMULATED else ("-Og",)
                folder = Path(self.build_temp) / (name + "".join(less))
                jobs += [(path, folder, (*FLAGS, *less, *flags, f"-DQT_ISA={name}"))]
        jobs.sort(key=lambda job: LONGEST.index(job[0].stem) if job[0].stem in LONGEST else len(LONGEST))
        newest_header = max(path.stat().st_mtime for path in headers)

        def compile_one(job: tuple[Path, Path, tuple[str, ...]]) -> list[str]:
            source, folder, flags = job
            objects = self.compiler.object_filenames([str(source)], output_dir=str(folder))
            built = Path(objects[0])
            newest = max(newest_header, source.stat().st_mtime, Path(__file__).stat().st_mtime)
            if not (built.exists() and built.stat().st_mtime > newest) or source.name in NAMED:
                objects = self.compiler.compile(
                    [str(source)],
                    output_dir=str(folder),
                    include_dirs=include_dirs,
                    extra_preargs=list(flags),
                    depends=ext.depends,
                )
            progress.step(f"{folder.name} {source.stem}")
            return objects

        progress = Progress(len(jobs))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [path for paths in threads.map(compile_one, jobs) for path in paths]
        linked = Path(self.build_temp) / "_host.so"
        self.compiler.link_shared_object(objects, str(linked), extra_preargs=["-pthread"], target_lang="c++")
        target = Path(
            self.get_ext_fullpath(ext.name)
        )  # replaced atomically: another process may be loading it
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, temporary)
        temporary.chmod(0o755)
        temporary.replace(target)


HOST_LIBRARY = Extension(
    "quintet.executor.backends.cpu.ops._host",
    sources=[],
    depends=[str(path) for path in SOURCES.rglob("*") if path.suffix in {".cpp", ".hpp"}],
    optional=True,
)
setup(
    ext_modules=[] if KERNELS == "none" else [HOST_LIBRARY],
    cmdclass={"build_ext": BuildKernels},
)
