"""Programs in C++ beside the kernels: what setup.py compiles, and a program of it and of tests, once for each content."""

from __future__ import annotations

import ast
import getpass
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "csrc/cpu"
INCLUDES = tuple(
    f"-I{folder}" for folder in sorted({path.parent for path in KERNELS.rglob("*.hpp")} | {KERNELS})
)
"""Compiler flags: folders of headers."""
NATIVE = shlex.split(os.environ.get("CXX", "g++"))
"""In words, as make has it: a launcher such as ccache may stand first."""


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Return what a command writes, which must succeed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def kernel_sources(machine: str) -> list[tuple[Path, tuple[str, ...]]]:
    """What setup.py compiles for a machine, and with which options."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    tables = [node for node in assigned if not any(isinstance(part, ast.Call) for part in ast.walk(node))]
    said: dict[str, Any] = {}
    exec(compile(ast.Module(tables, []), "setup.py", "exec"), said)
    flags = (*said["FLAGS"], *INCLUDES)
    once = [
        path for path in sorted(KERNELS.rglob("*.cpp")) if "kernels" not in path.relative_to(KERNELS).parts
    ]
    sources = [
        (path, flags) for path in once if path.name != "library.cpp"
    ]  # it needs definitions of setup.py
    for name, (its_flags, patterns) in (said["BASELINE"] | said["INSTRUCTION_SETS"][machine]).items():
        for pattern in patterns:
            for path in sorted((KERNELS / "kernels").rglob(f"{pattern}.cpp")):
                sources.append((path, (*flags, *its_flags, f"-DQT_ISA={name}")))
    return sources


def compiled(
    compiler: Sequence[str], name: str, sources: list[tuple[Path, tuple[str, ...]]], *link: str | Path
) -> Path:
    """Return the program of these sources, compiled unless one of the same content lies there.

    link: options and libraries.
    """
    content = hashlib.sha256(repr((run(*compiler, "--version"), sources, link)).encode())
    libraries = [each for each in link if isinstance(each, Path)]
    folders = {path.parent for path, _ in sources}
    headers = {path for folder in folders for path in folder.glob("*.hpp")}
    for path in sorted({*KERNELS.rglob("*.[ch]pp"), *headers, *(path for path, _ in sources), *libraries}):
        content.update(path.name.encode() + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"quintet-checks-{getpass.getuser()}"
    target = folder / f"{name}-{content.hexdigest()[:16]}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:

        def compile_one(job: tuple[int, tuple[Path, tuple[str, ...]]]) -> str:
            index, (source, flags) = job
            built = str(Path(temporary) / f"{index}-{source.stem}.o")
            run(*compiler, *flags, "-c", str(source), "-o", built)
            return built

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, enumerate(sources)))
        program = Path(temporary) / name
        run(*compiler, *objects, *map(str, link), "-pthread", "-o", str(program))
        program.replace(target)  # whole or not at all, whoever else compiles the same
    return target
