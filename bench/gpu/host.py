"""Measure the host time of a step without graphs: a prompt of 64 tokens and 32 decode rows.

    python -m bench.gpu.host [--device cpu] [--profile FILE]

On a GPU: `StepWorker.begin` with the 8 B shape. With ``--device cpu``: the same Python code with a fake device; its launches
only fill argument buffers, and 32 layers of small matrices. That measures the Python code alone and is comparable between
commits.
"""

from __future__ import annotations

import cProfile
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from bench.arguments import command_parser
from bench.gpu.engine import drive
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.shapes import BLOCK_SIZE, LLAMA_3_8B, Shape, engine_config
from bench.gpu.synthetic_plans import Batch, Plans
from quintet.executor.backends.cuda.boot import make_device_worker
from quintet.executor.backends.cuda.device import Argument, ArgumentBuffer, Event, Kernel, Size
from quintet.executor.backends.registry import make_worker
from quintet.executor.checkpoints.weights.load import fill_randomly
from quintet.executor.context import WorkerContext
from quintet.executor.interface import StepWorker
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.models.model import Setting, build_model
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan

SMALL = dataclasses.replace(
    LLAMA_3_8B, name="32 small layers", hidden=512, intermediate=512, heads=4, kv_heads=2, vocab_size=2048
)
NUM_DECODES, PROMPT, CONTEXT = 32, 64, 128
WARM_UP, MEASURED = 5, 60


class DoneEvent:
    """A completed event."""

    def wait(self, expected_end_s: float | None = None) -> None:
        """As in `Event`."""

    def elapsed_ms(self, since: Event) -> float:
        """As in `Event`."""
        return 0.0


class HostOnlyDevice:
    """A `Device` that prepares launches like `CupyDevice`, but does not call the driver. It computes nothing."""

    torch_device = torch.device("cpu")
    num_multiprocessors = 132
    max_shared_bytes = 227 * 1024
    errors: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.num_launches = 0
        self.checks_arguments = True
        self._buffers: dict[Kernel, ArgumentBuffer] = {}

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Fill the kernel's argument buffer."""
        buffer = self._buffers.get(kernel)
        if buffer is None:
            buffer = self._buffers[kernel] = ArgumentBuffer(kernel)
        buffer.fill(args)
        self.num_launches += 1

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As in `Device`."""
        return torch.zeros(shape, dtype=dtype)

    def share_memory(self, num_bytes: int) -> tuple[int, bytes]:
        """Not used by one rank."""
        raise NotImplementedError("one rank shares no memory")

    def open_memory(self, handle: bytes) -> int:
        """Not used by one rank."""
        raise NotImplementedError("one rank opens no memory")

    def record(self) -> DoneEvent:
        """As in `Device`."""
        return DoneEvent()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As in `Device`."""
        return run

    def capture_timing(self, run: Callable[[], None]) -> Callable[[], None]:
        """As in `Device`."""
        return run

    def free_bytes(self) -> int:
        """As in `Device`."""
        return 1 << 30

    def total_bytes(self) -> int:
        """As in `Device`."""
        return 2 << 30

    def synchronize(self) -> None:
        """As in `Device`."""


def open_worker(shape: Shape, device: str, folder: Path) -> tuple[StepWorker, HostOnlyDevice | None]:
    """Return a worker without graphs, and the fake device if there is no GPU."""
    config: EngineConfig = engine_config(
        shape,
        folder,
        device,
        max_num_seqs=NUM_DECODES + 1,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        batch_invariant=device
        == "cpu",  # our kernels compute all products, so that torch computes nothing on the CPU
    )
    if device == "cuda":
        return make_worker(config), None
    from tests.cuda.kernels.row_major import RowMajor

    host = HostOnlyDevice()
    cache = msgspec.structs.replace(config.cache, memory_bytes=512 << 20)
    config = msgspec.structs.replace(config, cache=cache)
    setting = Setting(host.torch_device, torch.bfloat16, RowMajor())
    model = build_model(config.model.architecture, hf_config_of(config.model), setting)
    fill_randomly(model.weights, 0)
    worker = make_device_worker(host, model, WorkerContext(config))
    host.checks_arguments = False  # as on a GPU, after boot
    return worker, host


def mixed_steps(plans: Plans, count: int) -> tuple[list[StepPlan], list[StepPlan]]:
    """Return admissions, and steps with ``NUM_DECODES`` decode rows and one row that prefills ``PROMPT`` tokens each time."""
    batch = Batch(plans, NUM_DECODES, CONTEXT, count)
    blocks = [int(block) for block in plans.order[-(CONTEXT // BLOCK_SIZE) :]]
    admissions = [*batch.admissions, plans.admission(NUM_DECODES, blocks, CONTEXT)]
    steps = [
        plans.plan(
            slots=pack_i32(range(NUM_DECODES + 1)),
            starts=pack_i32([CONTEXT + step] * NUM_DECODES + [0]),
            counts=pack_i32([1] * NUM_DECODES + [PROMPT]),
            samples=pack_u8([1] * NUM_DECODES + [0]),
        )
        for step in range(count)
    ]
    return admissions, steps


def measure(device: str, report: Report, profile: Path | None) -> None:
    """Report the host time of a mixed step, and of a launch."""
    shape = LLAMA_3_8B if device == "cuda" else SMALL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        worker, host = open_worker(shape, device, Path(folder))
    plans = Plans(shape.vocab_size, worker.num_blocks, BLOCK_SIZE, 1024)
    admissions, steps = mixed_steps(plans, WARM_UP + MEASURED)
    drive(worker, admissions)
    drive(worker, steps[:WARM_UP])
    before = 0 if host is None else host.num_launches
    profiler = cProfile.Profile()
    if profile is not None:
        profiler.enable()
    clock = (
        time.perf_counter if host is None else time.thread_time
    )  # CPU time of this thread, without other load
    times = []
    for plan in steps[WARM_UP:]:
        begin_s = clock()
        pending = worker.begin(plan)
        times.append(clock() - begin_s)
        pending.wait()
        pending.result()
    if profile is not None:
        profiler.disable()
        profiler.dump_stats(profile)
    name = f"host time, step with a prompt of {PROMPT} tokens and {NUM_DECODES} decode rows"
    report.figure(Figure(name, 1e6 * median(times), "µs"))
    if host is not None:
        launches = (host.num_launches - before) / MEASURED
        report.figure(Figure(f"{name}: launches", launches, ""))
        report.figure(Figure(f"{name}: per launch", 1e6 * median(times) / launches, "µs"))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="file for the statistics of cProfile")
    add_report_argument(parser)
    arguments = parser.parse_args()
    with torch.inference_mode():
        measure(arguments.device, Report(arguments.figures), arguments.profile)


if __name__ == "__main__":
    main()
