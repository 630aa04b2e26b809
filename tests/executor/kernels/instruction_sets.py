"""Instruction sets of this processor: kernel tests are repeated with all but the best one."""

from __future__ import annotations

import ctypes

from quintet.executor.backends.cpu.ops.host_library import declare, instruction_set, open_library

REPEATING = "QUINTET_TEST_REPEATING"
"""Environment variable with the instruction set of a repeated run."""

MATRIX_UNITS = ("amx", "amx_emulated")
"""Instruction sets with matrix products: the processor's unit, and its emulation in plain C++."""


def isa() -> str:
    """Return the instruction set of this process."""
    library = open_library()
    assert library is not None, "the host kernels are not built"
    return instruction_set(library)


def instruction_sets(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets that this processor can run, in ascending order."""
    name_at = declare(library, "qt_isa_at", ctypes.c_int, result=ctypes.c_char_p)
    names: list[str] = []
    while (name := name_at(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def others() -> tuple[str, ...]:
    """Return the instruction sets to repeat the kernel tests with; none without kernels."""
    library = open_library()
    if library is None:
        return ()
    return tuple(name for name in instruction_sets(library) if name != isa())


def all_of_them() -> tuple[str, ...]:
    """Return the usable instruction sets, the best last; none without kernels."""
    return () if open_library() is None else (*others(), isa())
