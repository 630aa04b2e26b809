"""CUDA device: torch manages memory, streams, events and graphs; CuPy loads and launches kernels on torch's stream.

Both use the device's primary context, so they share addresses and streams. CuPy allocates only the memory that
processes share; torch allocates and accounts for the rest. Importing this module needs CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cupy
import torch

from quintet.executor.backends.cuda.device import (
    Argument,
    ArgumentBuffer,
    Event,
    Kernel,
    LaunchError,
    Size,
    check_launch,
)
from quintet.executor.backends.cuda.graph_capture import GraphCapture
from quintet.executor.backends.cuda.kernels.modules import FLAGS, KINDS, Kind, ModuleStore, RefusedError
from quintet.executor.backends.cuda.step_clock import wait_until_done
from quintet.wire.errors import ConfigError

DEFAULT_SHARED_BYTES = 48 << 10
"""Static plus dynamic shared memory that a kernel may use by default (CUDA C++ Programming Guide, "Compute Capabilities"). More
needs an opt-in per kernel."""

CARVEOUT_BYTES = 16 << 10
"""A kernel with at least this much dynamic shared memory per block requests the maximum shared memory carveout."""

ERRORS = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
"""CuPy's exceptions for driver errors. After one at a launch, the process cannot use the device any more."""


class CupyDevice:
    """A CUDA `Device`. Only the thread that created it may launch, because its context is current there."""

    def __init__(self, index: int, kinds: tuple[Kind, ...] = KINDS) -> None:
        """Make the device current in this thread. kinds: see `ModuleStore`."""
        torch.cuda.set_device(index)
        torch.cuda.synchronize(index)  # creates the primary context, which CuPy then uses
        cupy.cuda.Device(index).use()
        properties = torch.cuda.get_device_properties(index)
        self.torch_device = torch.device("cuda", index)
        self.num_multiprocessors: int = properties.multi_processor_count
        self.errors = ERRORS
        self.checks_arguments = True
        self.max_shared_bytes = int(cupy.cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"])
        self._modules = ModuleStore[cupy.RawModule](
            (properties.major, properties.minor), _CupyLoader(), kinds
        )
        self._launchers: dict[Kernel, _Launcher] = {}
        self._index = index
        # An eager step launches hundreds of kernels, so both calls bypass wrappers. `RawKernel.__call__` creates an object
        # per argument, and `torch.cuda.current_stream` one per call. Torch's generated code reads the stream in this way.
        self._launch = cupy.cuda.driver.launchKernel
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._graphs = GraphCapture()

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """See `Device`. The first launch of a kernel checks the arguments and loads the module."""
        launcher = self._launchers.get(kernel)
        if launcher is None:
            check_launch(self, kernel, grid, block, args, shared_bytes)
            launcher = self._launchers[kernel] = self._launcher(kernel, shared_bytes)
        if shared_bytes > launcher.shared_bytes:
            launcher.allow(shared_bytes)
        launcher.arguments.fill(args)
        stream = self._current_stream(self._index)
        self._launch(launcher.address, *grid, *block, shared_bytes, stream, launcher.arguments.address, 0)

    def usage(self, kernel: Kernel, num_threads: int, shared_bytes: int) -> KernelUsage:
        """Return registers, local memory and occupancy of a kernel for this block size. The kernel was launched before."""
        launcher = self._launchers[kernel]
        return KernelUsage(
            registers=int(launcher.kernel.num_regs),
            local_bytes=int(launcher.kernel.local_size_bytes),
            blocks_per_multiprocessor=int(
                cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    launcher.address, num_threads, shared_bytes
                )
            ),
        )

    def load(self, module: str) -> None:
        """Load a module before its first launch; `ConfigError` if no form of it is usable."""
        self._modules.get(module)

    def load_all(self, modules: Sequence[str], num_threads: int) -> None:
        """Load modules in parallel: compiling one may take most of a minute."""
        with ThreadPoolExecutor(num_threads, initializer=cupy.cuda.Device(self._index).use) as threads:
            for _ in threads.map(self._modules.get, modules):
                pass

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Device`. Pinned memory has one address for host and device (unified addressing)."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def share_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """See `Device`. Not allocated by torch: an IPC handle covers a whole allocation, which torch would subdivide."""
        address = int(cupy.cuda.runtime.malloc(num_bytes))
        cupy.cuda.runtime.memset(address, 0, num_bytes)
        self.synchronize()
        return address, bytes(cupy.cuda.runtime.ipcGetMemHandle(address))

    def open_memory(self, handle: bytes) -> int:
        try:
            return int(cupy.cuda.runtime.ipcOpenMemHandle(handle))
        except ERRORS as error:
            raise ConfigError(
                f"this GPU cannot access the memory of another rank's GPU ({error}): --tensor-parallel-size needs GPUs with"
                " peer access (`nvidia-smi topo -p2p r`) and, in a container, shared IPC (--ipc=host)"
            ) from error

    def record(self) -> Event:
        # blocking: a waiting thread sleeps; by default it would poll and occupy a core.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return CudaEvent(event)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return self._graphs.step_graph(run)

    def capture_timing(self, run: Callable[[], None]) -> Callable[[], None]:
        return self._graphs.timing_graph(run)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _launcher(self, kernel: Kernel, first_shared_bytes: int) -> _Launcher:
        try:
            raw = self._modules.get(kernel.module).get_function(kernel.name)
        except cupy.cuda.driver.CUDADriverError as error:
            raise LaunchError(f"{kernel.module}.cu has no kernel {kernel.name}: {error}") from error
        if first_shared_bytes >= CARVEOUT_BYTES:
            raw.preferred_shared_memory_carveout = 100
        shared_bytes = DEFAULT_SHARED_BYTES - raw.shared_size_bytes
        return _Launcher(raw, raw.kernel.ptr, ArgumentBuffer(kernel), shared_bytes)


class CudaEvent:
    """See `Event`."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, expected_end_s: float | None = None) -> None:
        wait_until_done(self._event.query, self._event.synchronize, expected_end_s)

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, CudaEvent):
            raise LaunchError(f"elapsed_ms needs an event of a CUDA device, not {since!r}")
        return float(since._event.elapsed_time(self._event))


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """Registers, local memory and occupancy of a kernel."""

    registers: int
    """Per thread."""
    local_bytes: int
    """Per thread: spilled registers, and arrays with computed indices."""
    blocks_per_multiprocessor: int


@dataclass(slots=True)
class _Launcher:
    """A loaded kernel."""

    kernel: cupy.RawKernel
    address: int
    """Handle of the driver's function; valid while ``kernel`` lives."""
    arguments: ArgumentBuffer
    shared_bytes: int
    """Dynamic shared memory currently allowed per block."""

    def allow(self, shared_bytes: int) -> None:
        """Raise the limit to ``shared_bytes``."""
        self.kernel.max_dynamic_shared_size_bytes = shared_bytes
        self.shared_bytes = shared_bytes


class _CupyLoader:
    """See `Loader`."""

    def load(self, path: Path, kernel: str | None) -> cupy.RawModule:
        module = cupy.RawModule(path=str(path))
        try:
            module.compile()
            if kernel is not None:
                module.get_function(kernel)
        except ERRORS as error:
            raise RefusedError(str(error)) from error
        return module

    def compile(self, text: str) -> cupy.RawModule:
        options = tuple(flag for flag in FLAGS if not flag.startswith("-ftz"))  # CuPy adds it
        module = cupy.RawModule(code=text, options=options)
        try:
            module.compile()
        except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
            raise RefusedError(str(error)) from error  # driver errors are RuntimeErrors too
        return module
