"""Kernel sources as one text per module, with digests and compiler flags.

A module is ``csrc/cuda/<name>.cu`` with our headers inlined, each once at its first include. So no header may be included under
a condition that differs between compilers. The digest of the text identifies the sources of a compiled kernel. CuPy caches by
the text, so it detects a changed header.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOURCES = Path(__file__).parent / "sources"
"""Link to csrc/cuda in a checkout; a copy of it in a wheel."""

FLAGS = ("-std=c++17", "-ftz=true", "-fmad=false")
"""Flags of nvcc and NVRTC. ``-ftz``: CuPy always adds it. ``-fmad=false``: template instances must round equally, so only an
explicit ``fmaf`` in the source fuses a multiplication with an addition."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[ \t]*(?://.*)?$')
_EMULATION = "emulation/"
"""Headers only for g++; not inlined, because CUDA compilers skip them."""


def modules(sources: Path = SOURCES) -> list[str]:
    """Return the sorted names of all modules; empty if the sources are not installed."""
    return sorted(path.stem for path in sources.glob("*.cu"))


def source_text(module: str, sources: Path = SOURCES) -> str:
    """Return a module's text with its headers inlined. Line directives keep the file names in compiler messages."""
    return "".join(_lines(sources / f"{module}.cu", sources, set()))


def digest(text: str) -> str:
    """Return the digest of a module's text and the flags."""
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
