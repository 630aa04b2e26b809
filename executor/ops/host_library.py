"""The compiled host kernels of ``csrc/cpu``: where they are, how they are called, whether this processor runs them.

Built when the package is installed (``setup.py``), loaded with ctypes. Knows nothing of what the kernels compute: each
has a file beside the reference it replaces, which checks shapes before it hands over addresses.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

Kernel = Callable[..., int | None]


@cache
def open_library() -> ctypes.CDLL | None:
    """Return the compiled kernels of ``csrc/cpu``, or None where they were not built; the log says so.

    Each family of kernels declares its functions in a file of its own, with `declare`.
    """
    path = Path(__file__).with_name(f"_host{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        log.info("host kernels: not built (no C++ compiler at installation?); computing with torch")
        return None
    return ctypes.CDLL(str(path))


def declare(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """Return the library's function ``name``, which takes and returns these C types."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    bound: Callable[..., Any] = function
    return bound


def set_threads(library: ctypes.CDLL, threads: int, pinned: bool) -> None:
    """Compute with so many threads from now on, each on a core of its own if ``pinned``; nothing may be running."""
    declare(library, "qt_set_threads", _INT, _INT)(threads, pinned)


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
