"""Interface of a device: launch, memory, events, graph capture.

Implemented by a GPU (`cupy_device`) and by the tests' emulator (`tests/cuda/emulated.py`). Launches go to torch's current stream,
in order with torch's work. Only `Event.wait` and `Device.synchronize` wait for the device.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Argument = torch.Tensor | int | float | None
Size = tuple[int, int, int]

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65535
MAX_BLOCK_THREADS = 1024
MAX_BLOCK_Z = 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function: its file in csrc/cuda, its symbol, and the kinds of its parameters.

    kinds: one letter per parameter, in order: p pointer (a tensor, or None for null), i int32, l int64, f float32.
    """

    module: str
    name: str
    kinds: str


class LaunchError(Exception):
    """Invalid launch, a bug of the caller. The message names the kernel and the argument."""


class Event(Protocol):
    """An event in a stream."""

    def wait(self, expected_end_s: float | None = None) -> None:
        """Wait until all work before the event has completed; releases the GIL.

        expected_end_s: by ``time.perf_counter``; see `quintet.executor.backends.cuda.step_clock`.
        """

    def elapsed_ms(self, since: Event) -> float:
        """Return the device time between the events. Both have completed and belong to the same device."""


class Device(Protocol):
    """One GPU."""

    @property
    def torch_device(self) -> torch.device:
        """Device of the tensors that `launch` accepts."""

    @property
    def num_multiprocessors(self) -> int:
        """Number of streaming multiprocessors."""

    @property
    def max_shared_bytes(self) -> int:
        """Maximum dynamic shared memory of a block."""

    checks_arguments: bool
    """True if operations check shapes, strides and addresses before a launch. The checks take half of the host time of an eager
    step, so they are off after startup, once the largest step has passed them."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions, besides torch's, that mean that this process cannot use the device any more."""

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Launch on torch's current stream; `LaunchError` if the arguments do not fit the kernel or the device."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory for asynchronous copies; kernels may access it."""

    def share_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """Allocate zeroed memory for the life of the process; return its address and a handle for other processes."""

    def open_memory(self, handle: bytes) -> int:
        """Map memory that another process shares; return its address, or raise `ConfigError` if it is not accessible."""

    def record(self) -> Event:
        """Record an event on the current stream."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of ``run`` and return a function that replays them on the current stream.

        - Capture computes nothing: outputs are unchanged until the first replay.
        - ``run`` must have run once before, so that the capture loads and allocates nothing for the first time.
        - Addresses are fixed: new input is copied into the captured tensors.
        - Memory allocated inside comes from one pool per device that all captures share. The next replay overwrites it.
        - The graph lives as long as the device.
        """

    def capture_timing(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` once, then capture it for a measurement; return a function that replays it on the current stream.

        The graph shares neither memory pool nor stream with those of `capture`, and is destroyed with the returned function.
        """

    def free_bytes(self) -> int:
        """Return the free device memory. Torch's cache does not count as free."""

    def total_bytes(self) -> int:
        """Return the total device memory."""

    def synchronize(self) -> None:
        """Wait until the device has completed all launches."""


def check_launch(
    device: Device, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int
) -> None:
    """Raise `LaunchError` if the launch does not fit the kernel's parameters or the limits of CUDA devices.

    A wrong argument would silently access other memory, so the emulator checks every launch. The GPU checks only the first launch
    of a kernel, because the check takes longer than a launch.
    """
    name = f"{kernel.module}.cu: {kernel.name}"
    if len(args) != len(kernel.kinds):
        raise LaunchError(
            f"{name}: {len(args)} arguments given; expected {len(kernel.kinds)} ({kernel.kinds})"
        )
    for index, (kind, value) in enumerate(zip(kernel.kinds, args, strict=True)):
        problem = _mismatch(device, kind, value)
        if problem:
            raise LaunchError(f"{name}: argument {index} ({kind} of {kernel.kinds}) {problem}")
    if not (1 <= grid[0] <= MAX_GRID_X and all(1 <= size <= MAX_GRID_YZ for size in grid[1:])):
        raise LaunchError(
            f"{name}: grid is {grid}; each must be at least 1, x at most 2^31 - 1, y and z at most {MAX_GRID_YZ}"
        )
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > MAX_BLOCK_THREADS or block[2] > MAX_BLOCK_Z:
        raise LaunchError(
            f"{name}: block is {block}; allowed are 1 to {MAX_BLOCK_THREADS} threads, z at most {MAX_BLOCK_Z}"
        )
    if not 0 <= shared_bytes <= device.max_shared_bytes:
        raise LaunchError(
            f"{name}: {shared_bytes} bytes of dynamic shared memory; at most {device.max_shared_bytes} are available"
        )


def _mismatch(device: Device, kind: str, value: Argument) -> str | None:
    """Return the problem of an argument, or None."""
    if kind == "p":
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            return f"is {value!r}; expected a tensor or None"
        if value.device.type != device.torch_device.type and not value.is_pinned():
            return f"is a tensor on {value.device}; expected {device.torch_device} or pinned memory"
        return None
    if kind == "f":
        return None if isinstance(value, float | int) else f"is {value!r}; expected a float"
    if kind not in "il":
        return "has an unknown kind; allowed are p, i, l and f"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"is {value!r}; expected an int"
    bits = 32 if kind == "i" else 64
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return f"is {value}, which exceeds {bits} bits"
    return None


_SLOT_BYTES = 8
_SLOTS = {"p": "Q", "i": "i4x", "l": "q", "f": "f4x"}
"""Struct format of a parameter in eight bytes, by kind; little-endian, as on every machine with CUDA."""


class ArgumentBuffer:
    """Parameters of one kernel in the driver's form: an array of addresses of the parameters' bytes.

    Refilled per launch: an eager step launches hundreds of kernels, so host time per launch may leave the device idle. The driver
    copies them at launch, so they may be overwritten afterwards.
    """

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
