"""Loads the compiled host kernels of ``csrc/cpu`` with ctypes.

``setup.py`` builds the library at installation. Each family of kernels has its own module, which declares the functions and
checks shapes. The C structs are mirrored in Python by hand, so a library built from other sources is rejected
(`check_library`): wrong arguments would corrupt memory.
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
"""Sources in a checkout; absent from an installed package."""

_SIZE, _INT = ctypes.c_int64, ctypes.c_int


@cache
def open_library() -> ctypes.CDLL | None:
    """Return the compiled kernels of ``csrc/cpu``, or None, with a log line, if they are not built for this processor.

    Raises `ConfigError` if the interface of the library differs from the checkout's sources.
    """
    path = Path(__file__).with_name(f"_host{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        log.info("host kernels: not built (no C++ compiler at installation?); using torch instead")
        return None
    library = ctypes.CDLL(str(path))
    if SOURCES.is_dir():
        check_library(library, SOURCES, path.name)
    if declare(library, "qt_isa_at", _INT, result=ctypes.c_char_p)(0) is None:
        log.warning(
            "host kernels: %s was built on another processor, for instruction sets that this one lacks; using torch instead."
            " `make kernels` builds all",
            path.name,
        )
        return None
    return library


def check_library(library: ctypes.CDLL, sources: Path, name: str) -> None:
    """Raise `ConfigError` if the library's interface differs from ``sources``; warn if only the kernels differ."""
    advice = "rebuild with `make install` (without make: `python setup.py build_ext --inplace`)"
    names = ("qt_interface", "qt_sources")
    built = [_text_of(library, each) if hasattr(library, each) else None for each in names]
    if built[0] != host_sources.interface_of(sources):
        raise ConfigError(f"{name} was built from sources other than {sources}: {advice}")
    if built[1] != host_sources.sources_of(sources):
        log.warning("host kernels: %s was built from sources other than %s; %s", name, sources, advice)


def check_layout(library: ctypes.CDLL, function: str, size: int) -> None:
    """Raise `ConfigError` if a C struct has another size than its Python mirror."""
    expected: int = declare(library, function, result=_SIZE)()
    if expected != size:
        raise ConfigError(
            f"{function} returns {expected} bytes, but the Python struct has {size}: the compiled kernels were built from"
            " other sources; run `make install`, or reinstall the package"
        )


def _text_of(library: ctypes.CDLL, function: str) -> str:
    text: bytes = declare(library, function, result=ctypes.c_char_p)()
    return text.decode()


def declare(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """Return the library's function ``name`` with its C argument and result types set."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., Any] = function
    return bound


def set_threads(library: ctypes.CDLL, threads: int, pinned: bool) -> None:
    """Set the number of compute threads. ``pinned``: bind each to one core. No kernel may be running."""
    declare(library, "qt_set_threads", _INT, _INT)(threads, pinned)


def sources_name(library: ctypes.CDLL) -> str:
    """Return the hash of the sources that the kernels were built from."""
    return _text_of(library, "qt_sources")


def instruction_set(library: ctypes.CDLL) -> str:
    """Return the instruction set in use on this processor."""
    return _text_of(library, "qt_isa")


def instruction_set_refusal(library: ctypes.CDLL) -> str | None:
    """Return the reason that the requested (or best) instruction set is not in use; None if it is."""
    return _text_of(library, "qt_isa_refusal") or None
