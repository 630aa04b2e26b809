"""The compiled host kernels of ``csrc/cpu``: where they are, how they are called, whether this processor runs them.

Built when the package is installed (``setup.py``), loaded with ctypes. Knows nothing of what the kernels compute: each
has a file beside the reference it replaces, which checks shapes before it hands over addresses.

Functions are declared and structs laid out here by hand, so a library of other sources would be given wrong arguments and
write where it must not: it is refused (`check_library`).
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from quintet.executor.backends.cpu.ops import host_sources
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parents[4] / "csrc" / "cpu"
"""Where a checkout has the sources; an installed package has none."""

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

Kernel = Callable[..., int | None]


@cache
def open_library() -> ctypes.CDLL | None:
    """Return the compiled kernels of ``csrc/cpu``, or None where they were not built; the log says so.

    Each family of kernels declares its functions in a file of its own, with `declare`. Raises `ConfigError` where they were
    built from other sources than those beside this package.
    """
    path = Path(__file__).with_name(f"_host{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        log.info("host kernels: not built (no C++ compiler at installation?); computing with torch")
        return None
    library = ctypes.CDLL(str(path))
    if SOURCES.is_dir():
        check_library(library, SOURCES, path.name)
    return library


def check_library(library: ctypes.CDLL, sources: Path, name: str) -> None:
    """Refuse, with `ConfigError`, a library whose functions are not those of ``sources``; warn of one with older kernels."""
    advice = "`make install` builds them (without make: `python setup.py build_ext --inplace`)"
    asked = getattr(library, "qt_interface", None), getattr(library, "qt_sources", None)
    built = [None if ask is None else _text_of(ask) for ask in asked]
    if built[0] != host_sources.interface_of(sources):
        raise ConfigError(f"{name} was built from other sources than {sources}: {advice}")
    if built[1] != host_sources.sources_of(sources):
        log.warning("host kernels: %s was built from other sources than %s; %s", name, sources, advice)


def check_layout(library: ctypes.CDLL, function: str, size: int) -> None:
    """Refuse, with `ConfigError`, a library in which a struct that Python lays out by hand has another size than here."""
    expected: int = declare(library, function, result=_SIZE)()
    if expected != size:
        raise ConfigError(
            f"the compiled kernels say {expected} bytes by {function}, Python has {size}: they were built from other"
            " sources; `make install` builds them, or install the package again"
        )


def _text_of(ask: Any) -> str:
    ask.restype = ctypes.c_char_p
    text: bytes = ask()
    return text.decode()


def declare(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """Return the library's function ``name``, which takes and returns these C types."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., Any] = function
    return bound


def set_threads(library: ctypes.CDLL, threads: int, pinned: bool) -> None:
    """Compute with so many threads from now on, each on a core of its own if ``pinned``; nothing may be running."""
    declare(library, "qt_set_threads", _INT, _INT)(threads, pinned)


def sources_name(library: ctypes.CDLL) -> str:
    """Return the name of the sources that the kernels were built from."""
    name: bytes = declare(library, "qt_sources", result=ctypes.c_char_p)()
    return name.decode()


def instruction_set(library: ctypes.CDLL) -> str:
    """Return the name of the instruction set that the kernels use on this processor."""
    name: bytes = declare(library, "qt_isa", result=ctypes.c_char_p)()
    return name.decode()


def instruction_set_refusal(library: ctypes.CDLL) -> str | None:
    """Return why the best instruction set of this processor, or the one that was asked for, is not in use; None if it is."""
    reason: bytes = declare(library, "qt_isa_refusal", result=ctypes.c_char_p)()
    return reason.decode() or None


def instruction_sets(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the names of the instruction sets that kernels can be run with on this processor, lesser ones first."""
    name_at = declare(library, "qt_isa_at", _INT, result=ctypes.c_char_p)
    names: list[str] = []
    while (name := name_at(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
