"""Where the kernels' sources are, as one text per module: what every compiler gets, and what a compiled kernel is known by.

Owns the flags that change what a kernel computes. Knows no compiler.

A module is ``csrc/cuda/<name>.cu`` with our headers put in, each once, where it is first included (so none may be
included under a condition that not every compiler meets). So the digest of one text tells whether a compiled kernel is
of these sources, and CuPy, which caches by the text it is given, notices a changed header.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOURCES = Path(__file__).parent / "sources"
"""A link to csrc/cuda in a checkout, a copy of it in a wheel."""

FLAGS = ("-std=c++17", "-ftz=true", "-fmad=false")
"""Of nvcc and NVRTC alike. CuPy adds the second by itself, so all ways have it. The third: two instances of a template
must round alike, so a multiplication is fused with an addition where the source says ``fmaf`` and nowhere else."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[ \t]*(?://.*)?$')
_EMULATION = "emulation/"
"""Headers for g++ alone: left as they are, behind a condition that no CUDA compiler meets."""


def modules(sources: Path = SOURCES) -> list[str]:
    """Return the names of all modules, sorted; none where the sources are not installed."""
    return sorted(path.stem for path in sources.glob("*.cu"))


def source_text(module: str, sources: Path = SOURCES) -> str:
    """Return a module's text with its headers put in. Line directives keep compilers' messages about the files."""
    return "".join(_lines(sources / f"{module}.cu", sources, set()))


def digest(text: str) -> str:
    """Return what a kernel compiled from a module's text is known by."""
    return hashlib.sha256("\0".join((text, *FLAGS)).encode()).hexdigest()


def _lines(path: Path, sources: Path, included: set[str]) -> list[str]:
    shown = path.relative_to(sources)
    lines = [f'#line 1 "{shown}"\n']
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        include = _INCLUDE.match(line)
        if include is None or include[1].startswith(_EMULATION):
            lines.append("\n" if line.strip() == "#pragma once" else line.rstrip("\n") + "\n")
        elif include[1] not in included:
            included.add(include[1])
            lines += _lines(sources / include[1], sources, included)
            lines.append(f'#line {number + 1} "{shown}"\n')
        else:
            lines.append("\n")
    return lines
