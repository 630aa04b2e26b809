"""Which instruction sets the kernels can compute with here: their tests are repeated with those that are not the best."""

from __future__ import annotations

from quintet.executor.backends.cpu.ops.host_library import instruction_set, instruction_sets, open_library

REPEATING = "QUINTET_TEST_REPEATING"
"""Names the instruction set that tests are being repeated with."""

MATRIX_UNITS = ("amx", "amx_emulated")
"""Those that multiply matrices: the processor's unit, and its arithmetic in plain C++."""


def isa() -> str:
    """The instruction set that this process computes with."""
    library = open_library()
    assert library is not None, "the host kernels are not built"
    return instruction_set(library)


def others() -> tuple[str, ...]:
    """What the kernels' tests are to be repeated with: nothing where there are no kernels."""
    library = open_library()
    if library is None:
        return ()
    return tuple(name for name in instruction_sets(library) if name != isa())


def all_of_them() -> tuple[str, ...]:
    """What the kernels can compute with here, the best last; nothing where there are none."""
    return () if open_library() is None else (*others(), isa())
