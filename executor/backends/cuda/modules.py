"""Which compiled form of a module a device gets: machine code of its kind, PTX for its driver to compile, or the source.

Owns the order, the check that a compiled file is of these sources, and the words when none can be used. Does not know
how a file becomes a loaded module: that is the `Loader`'s.

A driver takes machine code and PTX of its own CUDA version and older ones. So a form that is there may still be refused,
and then the next is tried.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from quintet.executor.backends.cuda.sources import SOURCES, digest, source_text
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

BUILT = Path(__file__).parent / "cubins"
"""``sm_90/norm.cubin``, ``ptx/norm.ptx``; beside each ``norm.txt``: what it was compiled from, with what, to what size."""

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
"""What a record says of each kernel, in the assembler's words."""

OLDEST = (8, 0)
"""Compute capability that the kernels need: asynchronous copies and bf16 matrix instructions."""

Kind = Literal["cubin", "ptx", "source"]
KINDS: tuple[Kind, ...] = ("cubin", "ptx", "source")

LoadedT = TypeVar("LoadedT")
LoadedT_co = TypeVar("LoadedT_co", covariant=True)


class RefusedError(Exception):
    """The driver does not take this file, or the compiler not this source; the message has its words."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to get a module."""

    kind: Kind
    path: Path
    """The compiled file; the folder of sources for ``source``."""
    description: str
    """For the log."""


class Loader(Protocol[LoadedT_co]):
    """How a file or a text becomes a module that kernels can be taken from. Both raise `RefusedError`."""

    def load(self, path: Path, kernel: str | None) -> LoadedT_co:
        """Load machine code or PTX. ``kernel``: one of those in it, to load at once, as drivers put off what they can."""
        ...

    def compile(self, text: str) -> LoadedT_co:
        """Compile for this device, or take from a cache what was compiled before."""
        ...


def forms(
    module: str, capability: tuple[int, int], built: Path = BUILT, sources: Path = SOURCES
) -> tuple[list[Form], list[str]]:
    """Return the ways to get a module on a device of this compute capability, best first, and why others are not among them.

    Machine code runs on devices of its own major capability, from its minor one on; PTX on all later ones.
    """
    found, missing = [], []
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
            missing.append(f"{_shown(form.path)} is not there")
        elif current is not None and _compiled_from(form.path) != current:
            missing.append(f"{_shown(form.path)} was compiled from other sources")
        else:
            found.append(form)
    if current is not None:
        found.append(Form("source", source, f"source, compiled by NVRTC for {device}"))
    else:
        missing.append(f"{source} is not there")
    return found, missing


class ModuleStore(Generic[LoadedT]):
    """The modules that one device has loaded."""

    def __init__(
        self,
        capability: tuple[int, int],
        loader: Loader[LoadedT],
        kinds: tuple[Kind, ...] = KINDS,
        built: Path = BUILT,
        sources: Path = SOURCES,
    ) -> None:
        """``kinds``: forms that may be used; a test of one form leaves the others out."""
        self._capability = capability
        self._loader = loader
        self._kinds = kinds
        self._built = built
        self._sources = sources
        self._loaded: dict[str, LoadedT] = {}
        self._said: set[str] = set()

    def get(self, module: str) -> LoadedT:
        """Return a module, loaded at its first use; `ConfigError` if no form of it can be had."""
        loaded = self._loaded.get(module)
        if loaded is None:
            loaded = self._loaded[module] = self._load(module)
        return loaded

    def _load(self, module: str) -> LoadedT:
        found, missing = forms(module, self._capability, self._built, self._sources)
        for form in found:
            if form.kind not in self._kinds:
                continue
            try:
                if form.kind == "source":
                    if missing:
                        log.info("compiling %s.cu with NVRTC, once: it is kept in CuPy's cache", module)
                    loaded = self._loader.compile(source_text(module, self._sources))
                else:
                    loaded = self._loader.load(form.path, _first_kernel(form.path))
            except RefusedError as error:
                missing.append(f"{_shown(form.path)} is refused: {error}")
                continue
            self._say(form, missing)
            return loaded
        raise ConfigError(
            f"no form of the kernels in {module}.cu can be used: {'; '.join(missing)}. Install a wheel with compiled"
            " kernels, run `make cubins`, or give NVRTC what it lacks"
        )

    def _say(self, form: Form, missing: list[str]) -> None:
        """Log a way once, not once per module."""
        if form.description not in self._said:
            self._said.add(form.description)
            log.info("kernels: %s%s", form.description, f" ({'; '.join(missing)})" if missing else "")


def record_path(compiled: Path) -> Path:
    """Return the file beside a compiled one that says what it was compiled from."""
    return compiled.with_suffix(".txt")


def _compiled_from(compiled: Path) -> str | None:
    """Return the digest of the sources of a compiled file; None if it does not say."""
    try:
        return record_path(compiled).read_text().partition("\n")[0]
    except OSError:
        return None


def _first_kernel(compiled: Path) -> str | None:
    """Return the name of a kernel in a compiled file; None if its record names none."""
    try:
        entry = ENTRY.search(record_path(compiled).read_text())
    except OSError:
        return None
    return entry[1] if entry else None


def _cubins(module: str, capability: tuple[int, int], built: Path) -> list[Path]:
    """Return where machine code that the device runs would be, the nearest capability first."""
    major, minor = capability
    fitting = [
        target
        for folder in built.glob("sm_*")
        if (target := _target(folder.name)) is not None and target[0] == major and target[1] <= minor
    ]
    folders = (
        [f"sm_{major}{minor}"] if not fitting else [f"sm_{a}{b}" for a, b in sorted(fitting, reverse=True)]
    )
    return [built / name / f"{module}.cubin" for name in folders]


def _target(folder: str) -> tuple[int, int] | None:
    digits = folder.removeprefix("sm_")
    return (int(digits[:-1]), int(digits[-1])) if digits.isdigit() and len(digits) > 1 else None


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
