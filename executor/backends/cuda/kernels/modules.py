"""Kernel modules: their sources as one text, and the choice of a form for a device.

Selects the form of a kernel module for a device: machine code, PTX for the driver to compile, or the source.

Owns the order, the check that a compiled file matches the sources, and the error if no form is usable. A `Loader`
loads the files. A driver accepts machine code and PTX of its CUDA version and older ones; if it rejects a form, the
next one is tried.

The source of a module is ``csrc/cuda/<name>.cu`` with our headers inlined, each once at its first include. So no
header may be included under a condition that differs between compilers. The digest of the text identifies the sources
of a compiled kernel. CuPy caches by the text, so it detects a changed header.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from quintet.wire.errors import ConfigError

SOURCES = Path(__file__).parents[1] / "sources"
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


log = logging.getLogger(__name__)

BUILT = Path(__file__).parents[1] / "cubins"
"""``sm_90/norm.cubin``, ``ptx/norm.ptx``; each has a record ``norm.txt`` with sources, compiler and kernel sizes."""

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
"""Line of the assembler's log that names a kernel."""

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability: the kernels use asynchronous copies and bf16 matrix instructions."""

Kind = Literal["cubin", "ptx", "source"]
KINDS: tuple[Kind, ...] = ("cubin", "ptx", "source")

LoadedT = TypeVar("LoadedT")
LoadedT_co = TypeVar("LoadedT_co", covariant=True)


class RefusedError(Exception):
    """The driver rejects a file, or the compiler a source; the message is its own."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a module."""

    kind: Kind
    path: Path
    """Compiled file, or source file."""
    description: str
    """For the log."""


class Loader(Protocol[LoadedT_co]):
    """Loads a file or compiles a text into a module of kernels. Both methods raise `RefusedError`."""

    def load(self, path: Path, kernel: str | None) -> LoadedT_co:
        """Load machine code or PTX. kernel: one of its kernels, looked up at once because drivers load lazily."""

    def compile(self, text: str) -> LoadedT_co:
        """Compile for this device, or load from a cache."""


def forms(
    module: str, capability: tuple[int, int], built: Path = BUILT, sources: Path = SOURCES
) -> tuple[list[Form], list[str]]:
    """Return the usable forms of a module for this compute capability, best first, and the reasons against the others.

    Machine code runs on devices of the same major and the same or a later minor capability; PTX runs on all later ones.
    """
    usable, missing = [], []
    device = f"compute capability {capability[0]}.{capability[1]}"
    source = sources / f"{module}.cu"
    current = digest(source_text(module, sources)) if source.is_file() else None
    candidates = [
        Form("cubin", path, f"machine code ({path.parent.name}) for {device}")
        for path in _cubins(module, capability, built)
    ]
    candidates.append(
        Form("ptx", built / "ptx" / f"{module}.ptx", f"PTX, compiled by the driver for {device}")
    )
    for form in candidates:
        if not form.path.is_file():
            missing.append(f"{_shown(form.path)} does not exist")
        elif current is not None and _compiled_from(form.path) != current:
            missing.append(f"{_shown(form.path)} was compiled from other sources")
        else:
            usable.append(form)
    if current is not None:
        usable.append(Form("source", source, f"source, compiled by NVRTC for {device}"))
    else:
        missing.append(f"{source} does not exist")
    return usable, missing


class ModuleStore(Generic[LoadedT]):
    """Loaded modules of one device."""

    def __init__(
        self,
        capability: tuple[int, int],
        loader: Loader[LoadedT],
        kinds: tuple[Kind, ...] = KINDS,
        built: Path = BUILT,
        sources: Path = SOURCES,
    ) -> None:
        """kinds: allowed forms; tests restrict them."""
        self._capability = capability
        self._loader = loader
        self._kinds = kinds
        self._built = built
        self._sources = sources
        self._loaded: dict[str, LoadedT] = {}
        self._logged: set[str] = set()

    def get(self, module: str) -> LoadedT:
        """Return a module, loaded at its first use; `ConfigError` if no form of it is usable."""
        loaded = self._loaded.get(module)
        if loaded is None:
            loaded = self._loaded[module] = self._load(module)
        return loaded

    def _load(self, module: str) -> LoadedT:
        usable, missing = forms(module, self._capability, self._built, self._sources)
        for form in usable:
            if form.kind not in self._kinds:
                continue
            try:
                if form.kind == "source":
                    if missing:
                        log.info("kernels: compiling %s.cu with NVRTC; CuPy caches the result", module)
                    loaded = self._loader.compile(source_text(module, self._sources))
                else:
                    loaded = self._loader.load(form.path, _first_kernel(form.path))
            except RefusedError as error:
                missing.append(f"{_shown(form.path)} was rejected: {error}")
                continue
            self._log_form(form, missing)
            return loaded
        raise ConfigError(
            f"no form of the kernels in {module}.cu is usable: {'; '.join(missing)}. Install a wheel with compiled"
            " kernels, run `make cubins`, or fix NVRTC's error"
        )

    def _log_form(self, form: Form, missing: list[str]) -> None:
        """Log a form once, not once per module."""
        if form.description not in self._logged:
            self._logged.add(form.description)
            log.info("kernels: %s%s", form.description, f" ({'; '.join(missing)})" if missing else "")


def record_path(compiled: Path) -> Path:
    """Return the path of a compiled file's record."""
    return compiled.with_suffix(".txt")


def _compiled_from(compiled: Path) -> str | None:
    """Return the digest of a compiled file's sources; None without a record."""
    try:
        return record_path(compiled).read_text().partition("\n")[0]
    except OSError:
        return None


def _first_kernel(compiled: Path) -> str | None:
    """Return the name of a kernel in a compiled file; None if its record has none."""
    try:
        entry = ENTRY.search(record_path(compiled).read_text())
    except OSError:
        return None
    return entry[1] if entry else None


def _cubins(module: str, capability: tuple[int, int], built: Path) -> list[Path]:
    """Return the paths of machine code for the device, nearest capability first."""
    major, minor = capability
    matching = [
        target
        for folder in built.glob("sm_*")
        if (target := _target(folder.name)) is not None and target[0] == major and target[1] <= minor
    ]
    folders = (
        [f"sm_{major}{minor}"] if not matching else [f"sm_{a}{b}" for a, b in sorted(matching, reverse=True)]
    )
    return [built / name / f"{module}.cubin" for name in folders]


def _target(folder: str) -> tuple[int, int] | None:
    digits = folder.removeprefix("sm_")
    return (int(digits[:-1]), int(digits[-1])) if digits.isdigit() and len(digits) > 1 else None


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
