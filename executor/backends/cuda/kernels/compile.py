"""Compile the kernels of csrc/cuda without a GPU: ``python -m quintet.executor.backends.cuda.kernels.compile`` or
``make cubins``.

Packages ship NVRTC's output (`quintet.executor.backends.cuda.kernels.modules` loads it): machine code for three
generations of GPUs, and PTX of the first one for all others. nvcc compiles the sources as a check. Outputs of
unchanged sources are kept for any compiler version; ``--again`` compiles everything.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from quintet.executor.backends.cuda.kernels.compilers import (
    CompileError,
    Compiler,
    MissingCompilerError,
    find_nvcc,
    find_nvrtc,
)
from quintet.executor.backends.cuda.kernels.modules import (
    BUILT,
    ENTRY,
    SOURCES,
    digest,
    modules,
    record_path,
    source_text,
)

TARGETS = (80, 90, 100)
"""sm_80: A100 and, with the same major capability, RTX 30 and 40; sm_90: H100, H200; sm_100: B200, B300."""
PTX_TARGET = 80
"""Target of the shipped PTX, which drivers compile for later GPUs."""

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Compilation:
    """One module, compiled for one generation of GPUs by one compiler."""

    module: str
    text: str
    target: int
    compiler: Compiler
    folder: Path
    keeps: bool
    """True if the output is shipped; otherwise only its record is kept."""

    @property
    def cubin(self) -> Path:
        """Path of the machine code; its record is in the same folder."""
        return self.folder / f"sm_{self.target}" / f"{self.module}.cubin"

    @property
    def ptx(self) -> Path | None:
        """Path of the PTX, or None if it is not kept."""
        return (
            self.folder / "ptx" / f"{self.module}.ptx" if self.keeps and self.target == PTX_TARGET else None
        )

    @property
    def header(self) -> str:
        """First two lines of a record: digest of the sources, compiler version."""
        return f"{digest(self.text)}\n{self.compiler.version}\n"


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """Resources of one kernel, as reported by the assembler."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def is_current(job: Compilation) -> bool:
    """Return whether every output of the job exists and was compiled from these sources, by any compiler version."""
    sources = digest(job.text) + "\n"
    files = [job.cubin if job.keeps else record_path(job.cubin), *([job.ptx] if job.ptx else [])]
    return all(
        path.is_file() and record_path(path).is_file() and record_path(path).read_text().startswith(sources)
        for path in files
    )


def run(job: Compilation) -> None:
    """Compile and write the outputs. Each record is written last, so a file with a record is complete."""
    output = job.compiler.compile(job.module, job.text, job.target)
    record = (job.header + output.log).encode()
    files = {job.cubin: output.cubin if job.keeps else None}
    if job.ptx is not None:
        files[job.ptx] = output.ptx
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        record_path(path).unlink(missing_ok=True)
        if content is not None:
            _write(path, content)
        _write(record_path(path), record)


def usages(log: str) -> Iterator[KernelUsage]:
    """Yield the resources of each kernel in the assembler's log."""
    for part in re.split(r"(?=Compiling entry function)", log):
        entry = ENTRY.search(part)
        registers = _REGISTERS.search(part)
        if entry is None or registers is None:
            continue
        spills, shared = _SPILLS.search(part), _SHARED.search(part)
        yield KernelUsage(
            entry[1],
            int(registers[1]),
            max(int(spills[1]), int(spills[2])) if spills else 0,
            int(shared[1]) if shared else 0,
        )


def table(logs: dict[tuple[str, int], str]) -> Iterator[str]:
    """Yield the lines of a table: one row per kernel, one column per generation. logs: by module and generation."""
    rows: dict[str, dict[int, KernelUsage]] = {}
    for (module, target), log in logs.items():
        for usage in usages(log):
            rows.setdefault(f"{module}: {usage.kernel}", {})[target] = usage
    width = max((len(name) for name in rows), default=0)
    yield f"{'registers, static shared bytes':{width}}" + "".join(
        f"  {f'sm_{target}':>10}" for target in TARGETS
    )
    for name, row in sorted(rows.items()):
        usages_by_target = (row.get(target) for target in TARGETS)
        cells = [
            f"{use.registers:>4}{use.shared_bytes:>6}" if use else f"{'-':>10}" for use in usages_by_target
        ]
        yield f"{name:{width}}" + "".join(f"  {cell}" for cell in cells)


def warnings(logs: dict[tuple[str, int], str]) -> Iterator[str]:
    """Yield the compiler's warnings, and one for each kernel that spills registers."""
    yield from sorted({line for log in logs.values() for line in log.splitlines() if "warning" in line})
    for (module, target), log in sorted(logs.items()):
        for usage in usages(log):
            if usage.spilled_bytes:
                yield f"warning: {module}: {usage.kernel} spills {usage.spilled_bytes} bytes a thread on sm_{target}"


def compile_all(jobs: Sequence[Compilation], num_threads: int, again: bool = False) -> list[str]:
    """Run the outdated jobs in parallel, longest source first, and return the failures. again: run all jobs."""
    stale = sorted((job for job in jobs if again or not is_current(job)), key=lambda job: -len(job.text))
    failures = []
    with (
        ThreadPoolExecutor(num_threads) as threads,
        tqdm(total=len(stale), unit="compile", disable=not stale) as bar,
    ):
        running = {threads.submit(run, job): job for job in stale}
        for future in as_completed(running):
            job = running[future]
            bar.set_postfix_str(f"{job.module} sm_{job.target}")
            bar.update()
            error = future.exception()
            if isinstance(error, CompileError):
                failures.append(f"{job.module}.cu for sm_{job.target} with {job.compiler.version}:\n{error}")
            elif error is not None:
                raise error
    return failures


def prune(folder: Path, known: Sequence[str]) -> None:
    """Remove outputs of modules that no longer exist."""
    for path in folder.glob("**/*"):
        if path.is_file() and path.stem not in known:
            path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print a report; return 1 if a compilation failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    known = modules()
    if not known:
        print(f"no kernels in {SOURCES}", file=sys.stderr)
        return 1
    unknown = [name for name in options.modules if name not in known]
    if unknown:
        parser.error(f"unknown module {', '.join(unknown)}; allowed are {', '.join(known)}")
    try:
        first = find_nvcc() if options.only == "nvcc" else find_nvrtc(quick=options.check)
        output_compiler = None if options.check else first
        folder = BUILT / "checked" if options.check else BUILT
        compilers: list[tuple[Compiler, Path, Sequence[int]]] = [(first, folder, options.targets)]
        if options.only is None and not options.check:
            compilers.append((find_nvcc(), BUILT / "nvcc", options.nvcc_targets or options.targets))
    except MissingCompilerError as error:
        print(error, file=sys.stderr)
        return 1
    prune(BUILT, known)
    jobs = [
        Compilation(module, source_text(module), target, compiler, folder, compiler is output_compiler)
        for compiler, folder, targets in compilers
        for module in options.modules or known
        for target in targets
    ]
    failures = compile_all(jobs, options.jobs, options.again)
    for compiler, _, _ in compilers:
        logs = {
            (job.module, job.target): record_path(job.cubin).read_text()
            for job in jobs
            if job.compiler is compiler and is_current(job)
        }
        lines = [compiler.version, *(table(logs) if compiler is output_compiler else ())]
        lines += [] if options.check else warnings(logs)
        print("\n".join(lines))
    print("\n\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    print(f"{len(jobs) - len(failures)} of {len(jobs)} compiled: {len(known)} modules, output in {BUILT}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quintet.executor.backends.cuda.kernels.compile", description=__doc__
    )
    parser.add_argument("modules", nargs="*", help="modules to compile (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", choices=("nvcc", "nvrtc"), help="use only this compiler and keep its output")
    which.add_argument(
        "--check",
        action="store_true",
        help="only check quickly that NVRTC compiles the modules; keep no output",
    )
    parser.add_argument("--targets", nargs="+", type=int, choices=TARGETS, default=TARGETS, metavar="90")
    parser.add_argument(
        "--nvcc-targets",
        nargs="+",
        type=int,
        choices=TARGETS,
        metavar="90",
        help="default: those of --targets",
    )
    parser.add_argument("--again", action="store_true", help="compile everything, including current outputs")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="number of parallel compilations"
    )
    return parser


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically: a starting server may be reading it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
