"""A `Device` without a GPU: kernels of csrc/cuda compiled with g++ and run on CPU tensors, one thread at a time.

Each file is compiled at the first launch of one of its kernels. The output folder is named after a digest of all its
sources. Errors of a GPU, reported or silent, raise `LaunchError` or `KernelError` here. Timings mean nothing: `launch`
returns after the kernel has ended. csrc/cuda/emulation runs the threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import getpass
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quintet.executor.backends.cuda.device import Argument, Event, Kernel, LaunchError, Size, check_launch

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
"""A list of words as in make: a launcher such as ccache may come first."""
COMPILE = [
    *COMPILER,
    # -O1: -O2 compiles half as much again longer, more than the tests' kernels save.
    *("-std=c++17", "-O1", "-march=native", "-fPIC", "-fvisibility=hidden", "-w", "-DQT_EMULATED"),
    # Static variables of templates are not shared between files; integers wrap and types are punned as on a GPU.
    *("-fno-gnu-unique", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno"),
    # Vector loads from odd addresses and indices beyond an array: the emulator checks both itself.
    *("-fsanitize=alignment,bounds",),
]
# Larger storages are not copied at each launch, so their ends are not guarded.
MAX_GUARDED_BYTES = 4 << 20

_C_TYPES: dict[str, Callable[[float], ctypes._SimpleCData[int] | ctypes._SimpleCData[float]]] = {
    "i": lambda value: ctypes.c_int32(int(value)),
    "l": lambda value: ctypes.c_int64(int(value)),
    "f": ctypes.c_float,
}


aten = torch.ops.aten
WAITING = {
    *(aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten.lift_fresh),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.nonzero_static),
}
"""``item``, comparisons by the host, sizes that depend on values, and ``torch.tensor`` of host data."""
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class KernelError(Exception):
    """A kernel performed an invalid operation: the message names it, the block, the thread and the seed of the order."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
    )


class _Signature(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kinds", ctypes.c_char_p),
        ("max_threads", ctypes.c_int32),
        ("call", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
    )


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("argument", ctypes.c_int32),
        ("copy", ctypes.c_void_p),
        ("mapping", ctypes.c_void_p),
        ("mapping_size", ctypes.c_size_t),
    )


@dataclass(slots=True)
class EmulatedEvent:
    """An event that completes immediately, unless the device delays it."""

    made_at: float
    passed: threading.Event = field(default_factory=threading.Event)

    def is_done(self) -> bool:
        return self.passed.is_set()

    def wait(self, expected_end_s: float | None = None) -> None:
        self.passed.wait()

    def elapsed_ms(self, since: Event) -> float:
        assert isinstance(since, EmulatedEvent), since
        return (self.made_at - since.made_at) * 1e3


class NoHostSync(TorchDispatchMode):
    """Reject torch operations that a GPU cannot capture: the host would have to know their result or its size."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chooses_by_mask = func.overloadpacket in BY_INDEX and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if chooses_by_mask or func.overloadpacket in WAITING or func is aten.repeat_interleave.Tensor:
            raise LaunchError(f"{func} waits for the device, or copies from the host, within a captured step")
        return func(*args, **kwargs or {})


@cache
def _name_operations() -> None:
    """Make torch create its objects of all operations before several threads enter a mode.

    torch 2.13 creates an operation twice when two threads dispatch it first at the same time. Its dispatcher keeps a
    pointer to one object, its table the other, so the first is freed and then called.
    """
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and (found := getattr(aten, packet, None)) is not None:
            getattr(found, overload or "default", None)


class EmulatedDevice:
    """A small device of compute capability 9.0, on the CPU.

    ``seed`` determines the order of threads between barriers: a correct kernel gives the same bits for every seed.
    `hold` keeps later events incomplete until `release_events`, to simulate a busy device. The work itself is still
    done immediately.
    """

    torch_device = torch.device("cpu")
    num_multiprocessors = 4
    max_shared_bytes = 227 * 1024
    checks_arguments = True
    errors: tuple[type[Exception], ...] = (KernelError,)

    def __init__(self, sources: Path = SOURCES, seed: int = 1, rank: int | None = None) -> None:
        """rank: of several devices with kernels that wait for each other, each launched by its own thread."""
        self.seed = seed
        self.sources = sources
        self.num_launches = 0
        self.num_free_bytes = 1 << 30
        self.matrix_loads = (0, 0)
        """Of the last launch: matrices loaded by ``load_matrix_x4``, and additional accesses caused by bank conflicts."""
        self._shared: list[torch.Tensor] = []
        if rank is not None:
            _name_operations()
        self._modules = _Modules(sources, 0 if rank is None else rank + 1)
        self._held: list[EmulatedEvent] | None = None

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        check_launch(self, kernel, grid, block, args, shared_bytes)
        module = self._modules.open(kernel.module)
        module.run(kernel, grid, block, args, shared_bytes, self.seed)
        self.matrix_loads = module.count()
        self.num_launches += 1

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def share_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """All ranks are threads of one process: the address is the handle."""
        self._shared.append(torch.zeros(num_bytes, dtype=torch.uint8))
        address = self._shared[-1].data_ptr()
        return address, address.to_bytes(8, "little")

    def open_memory(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent(time.monotonic())
        if self._held is None:
            event.passed.set()
        else:
            self._held.append(event)
        return event

    def compile_all(self) -> None:
        """Compile every file in the background, for sessions that use most of them."""
        self._modules.compile_all()

    def hold(self) -> None:
        """Keep later events incomplete until `release_events`."""
        self._held = [] if self._held is None else self._held

    def release_events(self) -> None:
        """Complete all events recorded since `hold`; later events complete immediately."""
        held, self._held = self._held or [], None
        for event in held:
            event.passed.set()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with NoHostSync():  # type: ignore[no-untyped-call]
                run()

        return replay

    def capture_timing(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return self.capture(run)

    def free_bytes(self) -> int:
        return self.num_free_bytes

    def total_bytes(self) -> int:
        return 2 << 30

    def synchronize(self) -> None:
        """Do nothing: every launch has already ended."""


class _Modules:
    """The compiled files, opened on first use."""

    def __init__(self, sources: Path, rank: int) -> None:
        self._sources = sources
        self._rank = rank
        self._open: dict[str, _Module] = {}
        self._compiling: dict[str, Future[Path]] = {}
        self._compilers = ThreadPoolExecutor(os.cpu_count() or 1)
        self._lock = threading.Lock()

    def compile_all(self) -> None:
        for source in sorted(self._sources.glob("*.cu")):
            self._compile(source.stem)

    def _compile(self, module: str) -> Future[Path]:
        with self._lock:
            if module not in self._compiling:
                self._compiling[module] = self._compilers.submit(_compiled, self._sources, module)
            return self._compiling[module]

    def open(self, module: str) -> _Module:
        opened = self._open.get(module)
        if opened is None:
            opened = self._open[module] = _Module(self._compile(module).result(), self._rank)
        return opened


class _Module:
    """One compiled file: its kernels and its static shared memory."""

    def __init__(self, path: Path, rank: int) -> None:
        """rank: 0, or from 1 on for one of several, each with its own copy: a library is loaded once and runs one
        block at a time.
        """
        self._rank = rank
        with tempfile.TemporaryDirectory() as folder:
            loaded = Path(shutil.copy(path, folder)) if rank else path
            self._library = ctypes.CDLL(str(loaded))
        self._library.qt_run.restype = ctypes.c_char_p
        self._statics = _static_shared(path, self._library)
        self._lock = threading.Lock()  # one block runs at a time

    def run(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int, seed: int
    ) -> None:
        signature = self._signature(kernel)
        num_threads = block[0] * block[1] * block[2]
        if num_threads > signature.max_threads:
            raise LaunchError(
                f"{kernel.name} is compiled for blocks of up to {signature.max_threads} threads; {block} were asked for"
            )
        values = [
            ctypes.c_void_p(None if value is None else value.data_ptr())
            if kind == "p" and (value is None or isinstance(value, torch.Tensor))
            else _C_TYPES[kind](value)  # type: ignore[arg-type]  # check_launch has checked it
            for kind, value in zip(kernel.kinds, args, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        launch = _Launch(grid, block, shared_bytes, self._rank, seed)
        buffers = _guarded(args)
        with self._lock:
            problem = self._library.qt_run(
                ctypes.byref(signature),
                ctypes.byref(launch),
                addresses,
                *(self._statics, len(self._statics), buffers, len(buffers)),
            )
        if problem is not None:
            raise KernelError(f"{kernel.module}.cu: {problem.decode()}")

    def count(self) -> tuple[int, int]:
        """See `EmulatedDevice.matrix_loads`."""
        loads, conflicts = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.qt_count(ctypes.byref(loads), ctypes.byref(conflicts))
        return loads.value, conflicts.value

    def _signature(self, kernel: Kernel) -> _Signature:
        try:
            signature = _Signature.in_dll(self._library, f"qt_kernel_{kernel.name}")
        except ValueError:
            raise LaunchError(f"{kernel.module}.cu has no kernel {kernel.name!r}") from None
        kinds = signature.kinds.decode()
        if kinds != kernel.kinds:
            raise LaunchError(
                f"{kernel.module}.cu: {kernel.name} takes {kinds!r}, its Kernel says {kernel.kinds!r}"
            )
        return signature


def _guarded(args: Sequence[Argument]) -> ctypes.Array[_Buffer]:
    """Return the storages that arguments point into, without duplicates."""
    buffers: dict[int, _Buffer] = {}
    for index, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            continue
        storage = value.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if 0 < size <= MAX_GUARDED_BYTES and address not in buffers:
            buffers[address] = _Buffer(address, size, index, None, None, 0)
    return (_Buffer * len(buffers))(*buffers.values())


def _static_shared(path: Path, library: ctypes.CDLL) -> ctypes.Array[_Range]:
    """Return the addresses of the file's ``__shared__`` variables: static variables of functions, from the symbol table."""
    symbols: dict[str, tuple[int, int]] = {}
    table = subprocess.run(["nm", "-S", str(path)], check=True, capture_output=True, text=True).stdout
    for line in table.splitlines():
        fields = line.split()
        if len(fields) == 4 and (fields[3].startswith("_ZZ") or fields[3] == "qt_run"):
            symbols[fields[3]] = (int(fields[0], 16), int(fields[1], 16) if fields[2] in "bBdD" else 0)
    address = ctypes.cast(library.qt_run, ctypes.c_void_p).value
    assert address is not None, path
    base = address - symbols["qt_run"][0]
    ranges = [_Range(base + offset, size) for offset, size in symbols.values() if size]
    return (_Range * len(ranges))(*ranges)


def _compiled(sources: Path, module: str) -> Path:
    """Return the shared library of ``module``, compiled unless the folder has one of the same content."""
    source = sources / f"{module}.cu"
    if not source.exists():
        raise LaunchError(f"there is no kernel file {source}")
    content = hashlib.sha256(repr((COMPILE, platform.uname())).encode())
    for path in sorted({source, *sources.rglob("*.cuh"), *SOURCES.rglob("*.[ch][up][hp]")}):
        content.update(path.name.encode() + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"quintet-emulation-{getpass.getuser()}"
    target = folder / f"{module}-{content.hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{module}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # another process of this run was faster
            return target
        compiled, linked = Path(temporary) / "kernels.o", Path(temporary) / "kernels.so"
        include = [f"-I{sources}", f"-I{SOURCES}"]
        _run([*COMPILE, *include, "-x", "c++", "-c", str(source), "-o", str(compiled)])
        _run([*COMPILER, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(target)  # atomic: complete or absent
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}:\n{done.stderr[:4000]}")
