"""What the sources in ``csrc/cpu`` are, in two short names that the compiled library carries as well.

``setup.py`` runs this file by itself, where nothing is installed yet: it imports the standard library alone.
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
    "program.hpp",
    "ranks.hpp",
    "sampling.hpp",
    "states.hpp",
    "weight_formats.hpp",
    "work.hpp",
)
"""Headers whose structs and enumerations Python lays out by hand, or passes by number."""

_EXPORTED = re.compile(rb"(?:^//.*\n)*^QT_EXPORT[^{;]*", re.MULTILINE)
"""An exported function as Python must call it, with the words that say what its arguments are."""


def interface_of(folder: Path) -> str:
    """Return a name of what Python must know to call the library, the same as long as that does not change."""
    declared = (
        match for path in sorted(folder.glob("*.cpp")) for match in _EXPORTED.findall(path.read_bytes())
    )
    return _name_of([*declared, *((folder / name).read_bytes() for name in MIRRORED)])


def sources_of(folder: Path) -> str:
    """Return a name of all the sources."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".cpp", ".hpp"})
    return _name_of(part for path in paths for part in (path.name.encode(), path.read_bytes()))


def _name_of(parts: Iterable[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()[:16]
