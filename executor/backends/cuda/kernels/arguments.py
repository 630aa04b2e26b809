"""Kernel arguments in the driver's form: an array of addresses of the parameters' bytes.

Created once per kernel and refilled per launch. An eager step launches hundreds of kernels, so host time per launch may leave
the device idle.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from quintet.executor.backends.cuda.device import Argument, Kernel, LaunchError

_SLOT_BYTES = 8
_SLOTS = {"p": "Q", "i": "i4x", "l": "q", "f": "f4x"}
"""Struct format of a parameter in eight bytes, by kind; little-endian, as on every machine with CUDA."""


class ArgumentBuffer:
    """Parameters of one kernel. The driver copies them at launch, so they may be overwritten afterwards."""

    __slots__ = ("_addresses", "_are_pointers", "_layout", "_slots", "address")

    def __init__(self, kernel: Kernel) -> None:
        unknown = set(kernel.kinds) - set(_SLOTS)
        if unknown:
            raise LaunchError(
                f"{kernel.module}.cu: {kernel.name}: kinds {kernel.kinds!r}; only p, i, l and f are allowed"
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
        """Address of the array of addresses, the argument of ``cuLaunchKernel``."""

    def fill(self, args: Sequence[Argument]) -> None:
        """Write a launch's arguments.

        Raises `struct.error` for a number out of range, `TypeError` for a tensor instead of a number, and `ValueError` for a
        wrong count.
        """
        self._layout.pack_into(
            self._slots,
            0,
            *[
                (0 if value is None else value.data_ptr()) if is_pointer else value  # type: ignore[union-attr]
                for is_pointer, value in zip(self._are_pointers, args, strict=True)
            ],
        )
