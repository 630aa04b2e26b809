"""Limits of this machine, measured with the library's own threads: reading memory, multiplying in registers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from enum import StrEnum

from quintet.executor.backends.cpu.ops.host_library import declare
from quintet.executor.backends.cpu.ops.huge_pages import HugePages

READ_BYTES = 1 << 28


class Multiply(StrEnum):
    """Instructions of a kernel's products."""

    FLOATS = "qt_limit_fma"
    PAIRS = "qt_limit_bf16"
    BYTES = "qt_limit_vnni"
    MATRIX_PAIRS = "qt_limit_matrix_bf16"
    MATRIX_BYTES = "qt_limit_matrix_int8"

    @property
    def words(self) -> str:
        """Operand types of a product."""
        return _WORDS[self]


_WORDS = {
    Multiply.FLOATS: "fp32 vectors",
    Multiply.PAIRS: "bf16 vectors",
    Multiply.BYTES: "8-bit vectors",
    Multiply.MATRIX_PAIRS: "bf16 matrix unit",
    Multiply.MATRIX_BYTES: "8-bit matrix unit",
}


class Limits:
    """Measures a limit whenever asked, so that it can be taken right beside the kernel it is compared with.

    clock: seconds; ``time.thread_time`` leaves out what others have of the processor, with kernels on one thread, the caller.
    """

    def __init__(self, library: ctypes.CDLL, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._memory = HugePages(READ_BYTES).memory
        self._memory.fill_(1)
        self._read = declare(library, "qt_limit_read", ctypes.c_void_p, ctypes.c_int64)
        self._multiply: dict[Multiply, Callable[[], int]] = {
            kind: declare(library, kind.value, result=ctypes.c_int64) for kind in Multiply
        }

    def read_gb_s(self) -> float:
        """Read 256 MiB once."""
        begun = self.clock()
        self._read(self._memory.data_ptr(), READ_BYTES)
        return READ_BYTES / (self.clock() - begun) / 1e9

    def multiply_gop_s(self, kind: Multiply) -> float:
        """Multiply and add for some ten milliseconds; 1e9 operations a second, two for a multiplication with its addition.

        0 where the instruction set in use cannot multiply so.
        """
        begun = self.clock()
        operations = self._multiply[kind]()
        return operations / (self.clock() - begun) / 1e9
