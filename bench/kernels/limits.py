"""Measure the machine's limits with the kernels' threads: read bandwidth, and multiply rate in registers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from enum import StrEnum

from quintet.executor.backends.cpu.ops.host_library import declare
from quintet.executor.backends.cpu.ops.huge_pages import HugePages

READ_BYTES = 1 << 28


class Multiply(StrEnum):
    """Kind of multiply instructions."""

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
    """Measurement of the limits at any time, close to that of a kernel.

    clock: returns seconds; with one thread, ``time.thread_time`` excludes other load on the processor.
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
        """Read 256 MiB once; return the bandwidth in GB/s."""
        begun = self.clock()
        self._read(self._memory.data_ptr(), READ_BYTES)
        return READ_BYTES / (self.clock() - begun) / 1e9

    def multiply_gop_s(self, kind: Multiply) -> float:
        """Run multiply-adds for about ten milliseconds; return 1e9 operations per second, two per multiply-add.

        0 if the instruction set lacks these instructions.
        """
        begun = self.clock()
        operations = self._multiply[kind]()
        return operations / (self.clock() - begun) / 1e9
