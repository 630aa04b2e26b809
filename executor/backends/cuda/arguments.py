"""A launch's arguments as the driver takes them: an array of addresses, one per parameter, of the parameters' bytes.

Knows no device. Made once per kernel, and filled by one call per launch: an eager step launches hundreds of kernels, and
every microsecond here is a microsecond in which the device may run dry.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from quintet.executor.backends.cuda.device import Argument, Kernel, LaunchError

_SLOT_BYTES = 8
_SLOTS = {"p": "Q", "i": "i4x", "l": "q", "f": "f4x"}
"""By kind, how a parameter lies in its eight bytes; lowest first, as on every machine that CUDA runs on."""


class ArgumentBuffer:
    """The parameters of one kernel. The driver copies them when it launches, so they may be overwritten at once."""

    __slots__ = ("_addresses", "_are_pointers", "_layout", "_slots", "address")

    def __init__(self, kernel: Kernel) -> None:
        unknown = set(kernel.kinds) - set(_SLOTS)
        if unknown:
            raise LaunchError(
                f"{kernel.module}.cu: {kernel.name}: kinds {kernel.kinds!r}; p, i, l and f are known"
            )
        num = len(kernel.kinds)
        self._are_pointers = [kind == "p" for kind in kernel.kinds]
        self._layout = struct.Struct("<" + "".join(_SLOTS[kind] for kind in kernel.kinds))
        self._slots = ctypes.create_string_buffer(max(1, num) * _SLOT_BYTES)
        first = ctypes.addressof(self._slots)
        self._addresses = (ctypes.c_void_p * max(1, num))(
            *range(first, first + num * _SLOT_BYTES, _SLOT_BYTES)
        )
        self.address = ctypes.addressof(self._addresses)
        """Of the array of addresses: what ``cuLaunchKernel`` takes."""

    def fill(self, args: Sequence[Argument]) -> None:
        """Write a launch's arguments.

        Raises `struct.error` for a number that does not fit its parameter, `TypeError` for a tensor in place of a number,
        `ValueError` for too many or too few.
        """
        self._layout.pack_into(
            self._slots,
            0,
            *[
                (0 if value is None else value.data_ptr()) if is_pointer else value  # type: ignore[union-attr]
                for is_pointer, value in zip(self._are_pointers, args, strict=True)
            ],
        )
