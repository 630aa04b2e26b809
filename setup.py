"""Builds the host kernels of csrc/cpu; everything else about the package is in pyproject.toml.

Sources under ``csrc/cpu/kernels`` are compiled once for each instruction set, into a namespace of its own; the others
once. The library has a plain C ABI and is loaded with ctypes (quintet.executor.backends.cpu.ops.host_library), so no
Python headers and no torch are needed. Where it does not compile, the package installs without it and computes with
torch.

QUINTET_KERNELS in the environment chooses which instruction sets:

    all      all of them, optimised: what wheels carry, and the default
    native   those that this processor chooses, and the portable one for any other: a third of the time
    quick    all of them, but those that this processor does not choose optimised less: for tests
    none     none: the package computes with torch
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
"""Carry what names the sources, and which instruction sets are built: compiled each time."""

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")
ALL = ("*",)
INTEGERS = ("linear_integer", "limits")
ALL_BUT_INTEGERS = ("[!l]*", "limits", "linear_[!i]*", "logprobs")
PAIRS = ("linear_float", "limits")
MATRICES = ("linear_matrix*", "attention", "limits", "matrix_check")
# The flags of an instruction set, and which kernel sources it has of its own: where it has none, its parent's are used
# (csrc/cpu/dispatch.hpp).
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
"""Compiled first, so that no core is left with one of them when all else is done."""
MACHINES = {"AMD64": "x86_64"}  # other systems' names
KERNELS = os.environ.get("QUINTET_KERNELS", "all")
if KERNELS not in {"all", "native", "quick", "none"}:
    sys.exit(f"QUINTET_KERNELS is {KERNELS!r}; it must be all, native, quick or none")
MATRIX_UNIT = "amx"  # an operating system may refuse it
EMULATED = "amx_emulated"  # never chosen, but too slow when it is optimised less

FLAGS = (
    "-std=c++20",
    "-O3",
    "-g0",  # Python's own flags ask for debugging information: much to compile and to ship
    "-ffp-contract=off",  # two instances of a template must round alike: fused operations are written out
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    # GCC 12 warns of its own AVX-512 header, whose undefined vectors initialise themselves, and of passing vectors.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-Wno-unused-function",  # simd.hpp is a toolbox
    "-Werror=frame-larger-than=131072",  # threads may have small stacks: csrc/cpu/thread_memory.hpp
)


Sets = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def best_of_here(sets: Sets) -> set[tuple[str, Path]] | None:
    """Return the instruction set of each kernel source that is the best one for this processor, as the compiler knows it.

    None where it does not say: where it is not GCC for x86, or there is none.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    asked = [*compiler, "-march=native", "-Q", "--help=target"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    native = {line.split()[0] for line in said.splitlines() if line.strip().endswith("[enabled]")}
    best = {
        path: name
        for name, (flags, sources) in sets.items()
        if name != EMULATED and native.issuperset(flags)
        for pattern in sources
        for path in (SOURCES / "kernels").glob(f"{pattern}.cpp")
    }
    return {(name, path) for path, name in best.items()}


def grants_matrix_unit() -> bool:
    """Return whether the operating system lets this process use AMX tiles (Linux 5.16, arch/x86/xstate.rst)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):
        return False


def chosen_here(sets: Sets) -> set[tuple[str, Path]] | None:
    """Return `best_of_here`, without the matrix unit where the operating system refuses it."""
    return best_of_here(
        sets
        if grants_matrix_unit()
        else {name: kernels for name, kernels in sets.items() if name != MATRIX_UNIT}
    )


def complete_sets(sets: Sets, chosen: set[tuple[str, Path]]) -> list[str]:
    """Return the sets whose kernels, their own and those of lesser sets, are all built."""
    order = list(sets)
    return list(dict.fromkeys(("baseline", max((name for name, _ in chosen), key=order.index))))


class Progress:
    """Says how many sources are compiled: a line that is written over on a terminal, else a line each tenth."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def step(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            self._done += 1
            line = f"  kernels: {self._done} of {self._total} sources compiled"
            if sys.stderr.isatty():
                end = "\n" if self._done == self._total else ""
                print(f"\r{line} ({name})".ljust(78)[:78], end=end, file=sys.stderr, flush=True)
            elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
                print(line, file=sys.stderr, flush=True)


class BuildKernels(build_ext):
    """Compiles each kernel source for every instruction set, a few at a time."""

    def build_extension(self, ext: Extension) -> None:
        """See setuptools."""
        named = (
            *FLAGS,
            f'-DQT_INTERFACE="{NAMES["interface_of"](SOURCES)}"',
            f'-DQT_SOURCES="{NAMES["sources_of"](SOURCES)}"',
        )
        machine = MACHINES.get(platform.machine(), platform.machine())
        sets = BASELINE | INSTRUCTION_SETS.get(machine, {})
        best = chosen_here(sets) if machine == "x86_64" and KERNELS != "all" else None
        built = list(sets) if best is None or KERNELS == "quick" else complete_sets(sets, best)
        named = (*named, f'-DQT_BUILT="{" ".join(built)}"')
        jobs = [
            (path, Path(self.build_temp) / "once", named if path.name in NAMED else FLAGS)
            for path in sorted(SOURCES.glob("*.cpp"))
        ]
        for name, (flags, sources) in sets.items():
            for path in sorted(
                {path for pattern in sources for path in (SOURCES / "kernels").glob(f"{pattern}.cpp")}
            ):
                is_chosen = best is None or (name, path) in best
                if not is_chosen and KERNELS == "native" and name != "baseline":
                    continue
                less = () if is_chosen or name == EMULATED else ("-Og",)
                folder = Path(self.build_temp) / (name + "".join(less))
                jobs += [(path, folder, (*FLAGS, *less, *flags, f"-DQT_ISA={name}"))]
        jobs.sort(key=lambda job: LONGEST.index(job[0].stem) if job[0].stem in LONGEST else len(LONGEST))
        newest_header = max(path.stat().st_mtime for path in SOURCES.rglob("*.hpp"))

        def compile_one(job: tuple[Path, Path, tuple[str, ...]]) -> list[str]:
            source, folder, flags = job
            objects = self.compiler.object_filenames([str(source)], output_dir=str(folder))
            built = Path(objects[0])
            newest = max(newest_header, source.stat().st_mtime, Path(__file__).stat().st_mtime)
            if not (built.exists() and built.stat().st_mtime > newest) or source.name in NAMED:
                objects = self.compiler.compile(
                    [str(source)],
                    output_dir=str(folder),
                    include_dirs=[str(SOURCES)],
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
        target = Path(self.get_ext_fullpath(ext.name))  # replaced at once: another process may be loading it
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, beside)
        beside.chmod(0o755)
        beside.replace(target)


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
