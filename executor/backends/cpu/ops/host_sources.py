"""Hashes of the sources in ``csrc/cpu``; the compiled library carries the same hashes.

``setup.py`` runs this file before the package is installed, so it imports only the standard library.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

MIRRORED = (
    "attention.hpp",
    "blocks.hpp",
    "experts.hpp",
    "gram_index.hpp",
    "program.hpp",
    "ranks.hpp",
    "sampling.hpp",
    "states.hpp",
    "weight_formats.hpp",
    "work.hpp",
)
"""Headers with structs and enumerations that Python mirrors by hand."""

_EXPORTED = re.compile(rb"(?:^//.*\n)*^QT_EXPORT[^{;]*", re.MULTILINE)
"""Declaration of an exported function, with the comment that documents its arguments."""


def interface_of(folder: Path) -> str:
    """Return the hash of the interface: exported functions and mirrored headers."""
    declared = (
        match for path in sorted(folder.rglob("*.cpp")) for match in _EXPORTED.findall(path.read_bytes())
    )
    mirrored = (path for path in sorted(folder.rglob("*.hpp")) if path.name in MIRRORED)
    return _hash_of([*declared, *(path.read_bytes() for path in mirrored)])


def sources_of(folder: Path) -> str:
    """Return the hash of all sources."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".cpp", ".hpp"})
    return _hash_of(part for path in paths for part in (path.name.encode(), path.read_bytes()))


def _hash_of(parts: Iterable[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()[:16]
