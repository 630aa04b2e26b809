"""C++ programs linked with the kernels: the sources that setup.py compiles, and programs cached by content."""

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
"""Split like make's CXX: a launcher such as ccache may precede the compiler."""


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Return the output of a command, which must succeed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def kernel_sources(machine: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the sources that setup.py compiles for a machine, each with its options."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    tables = [node for node in assigned if not any(isinstance(part, ast.Call) for part in ast.walk(node))]
    tables_of_setup: dict[str, Any] = {}
    exec(compile(ast.Module(tables, []), "setup.py", "exec"), tables_of_setup)
    flags = (*tables_of_setup["FLAGS"], *INCLUDES)
    once = [
        path for path in sorted(KERNELS.rglob("*.cpp")) if "kernels" not in path.relative_to(KERNELS).parts
    ]
    sources = [
        (path, flags) for path in once if path.name != "library.cpp"
    ]  # it needs definitions of setup.py
    for name, (its_flags, patterns) in (
        tables_of_setup["BASELINE"] | tables_of_setup["INSTRUCTION_SETS"][machine]
    ).items():
        for pattern in patterns:
            for path in sorted((KERNELS / "kernels").rglob(f"{pattern}.cpp")):
                sources.append((path, (*flags, *its_flags, f"-DQT_ISA={name}")))
    return sources


def compiled(
    compiler: Sequence[str], name: str, sources: list[tuple[Path, tuple[str, ...]]], *link: str | Path
) -> Path:
    """Return the program of these sources, compiled unless one with the same content exists.

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
        program.replace(target)  # atomic if several processes compile the same
    return target
