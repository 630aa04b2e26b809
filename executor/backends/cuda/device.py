"""What kernels are launched on: the operations a device offers, and nothing of how it does them.

A GPU (`cupy_device`) and the emulator of the tests (`tests/cuda/emulated.py`) both are one. What is launched runs on
torch's current stream, in order with torch's own work there; nothing here waits for the device but `wait` and
`synchronize`.
"""

from __future__ import annotations

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
    """A compiled function: which file of csrc/cuda it is in, its symbol, and what it takes.

    ``kinds`` has one letter per parameter, in order: p pointer (a tensor, or None for a null pointer), i int32,
    l int64, f float32.
    """

    module: str
    name: str
    kinds: str


class LaunchError(Exception):
    """A launch that a GPU would refuse or, worse, accept: our mistake. The message names kernel and argument."""


class Event(Protocol):
    """A mark in a stream's order of work."""

    def is_done(self) -> bool:
        """Whether everything before the mark has run; does not wait."""
        ...

    def wait(self, expected_end_s: float | None = None) -> None:
        """Wait until everything before the mark has run; other Python threads run meanwhile.

        expected_end_s: by ``time.perf_counter``; see `quintet.executor.backends.cuda.step_clock`.
        """
        ...

    def elapsed_ms(self, since: Event) -> float:
        """Return the device's time from ``since`` to this mark; both are done and are events of one device."""
        ...


class Device(Protocol):
    """One GPU, as the executor sees it."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors given to `launch` live."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """How many blocks can run at the same time, if one fills a multiprocessor."""
        ...

    @property
    def max_shared_bytes(self) -> int:
        """The most dynamic shared memory a block may ask for."""
        ...

    checks_arguments: bool
    """Whether operations check shapes, strides and addresses before they launch. Off after boot, where the largest step has
    passed the checks: they are half of the host's time of a step that is launched kernel by kernel."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What launches and waits raise, besides torch's own, when the device is lost to this process."""
        ...

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Launch on torch's current stream; `LaunchError` where arguments do not fit the kernel or the device."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return page-locked host memory that copies run to and from asynchronously and kernels may address."""
        ...

    def share_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """Return the address of memory, zeros, that stays as long as the process, and a handle for other processes."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Return the address, for this device's kernels, of what another process shares; `ConfigError` if it cannot be had."""
        ...

    def record(self) -> Event:
        """Mark the current stream's end as it is now."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what ``run`` launches and return a function that replays it on the current stream.

        Capturing computes nothing: outputs hold what they held until the first replay. ``run`` has been run once
        outside, so that nothing is loaded or allocated for the first time inside. Tensors keep their addresses, so new
        input is copied into them; memory allocated inside comes from one pool per device, shared by all captures, so a
        replay's outputs hold only until the next replay. The graph lives as long as the device.
        """
        ...

    def capture_timing(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` once, then capture it for a measurement; return a function that replays it on the current stream.

        The graph shares neither memory pool nor stream with those of `capture`, and is destroyed with the returned
        function. Any number of timing graphs may follow each other.
        """
        ...

    def free_bytes(self) -> int:
        """Return the device memory nobody has, torch's cache not counted as free."""
        ...

    def total_bytes(self) -> int:
        """Return the device memory there is."""
        ...

    def synchronize(self) -> None:
        """Block until the device has done everything launched so far."""
        ...


def check_launch(
    device: Device, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int
) -> None:
    """Raise `LaunchError` if the launch does not fit ``kernel``'s parameters or what every CUDA device allows.

    A launch with a wrong argument reads other memory without a word, so tests check each; the GPU's device only checks
    a kernel's first launch, as this takes longer than launching.
    """
    name = f"{kernel.module}.cu: {kernel.name}"
    if len(args) != len(kernel.kinds):
        raise LaunchError(
            f"{name} takes {len(kernel.kinds)} arguments ({kernel.kinds}), {len(args)} were given"
        )
    for index, (kind, value) in enumerate(zip(kernel.kinds, args, strict=True)):
        problem = _mismatch(device, kind, value)
        if problem:
            raise LaunchError(f"{name}: argument {index} ({kind} of {kernel.kinds}) {problem}")
    if not (1 <= grid[0] <= MAX_GRID_X and all(1 <= size <= MAX_GRID_YZ for size in grid[1:])):
        raise LaunchError(
            f"{name}: grid {grid}; each is at least 1, x at most 2^31 - 1, y and z at most {MAX_GRID_YZ}"
        )
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > MAX_BLOCK_THREADS or block[2] > MAX_BLOCK_Z:
        raise LaunchError(
            f"{name}: block {block}; 1 to {MAX_BLOCK_THREADS} threads are allowed, z at most {MAX_BLOCK_Z}"
        )
    if not 0 <= shared_bytes <= device.max_shared_bytes:
        raise LaunchError(
            f"{name}: {shared_bytes} bytes of dynamic shared memory; {device.max_shared_bytes} are there"
        )


def _mismatch(device: Device, kind: str, value: Argument) -> str | None:
    """Return what is wrong with an argument, None if nothing is."""
    if kind == "p":
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            return f"is {value!r}; a tensor or None is expected"
        if value.device.type != device.torch_device.type and not value.is_pinned():
            return f"is a tensor on {value.device}; expected on {device.torch_device}, or pinned"
        return None
    if kind == "f":
        return None if isinstance(value, float | int) else f"is {value!r}; a float is expected"
    if kind not in "il":
        return "has an unknown kind; p, i, l and f are known"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"is {value!r}; an int is expected"
    bits = 32 if kind == "i" else 64
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return f"is {value}, which {bits} bits do not hold"
    return None
