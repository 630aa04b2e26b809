"""Load a model into this process, run decode steps, and count the bytes that a step moves."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.kernels.op_balance import balance_of, profile
from bench.step import BLOCK_SIZE, Steps
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.backends.torch.fallback.host_runner import HostRunner
from quintet.executor.slots import Rows
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """Capacity, number formats and implementation of a measured model."""

    dtype: Literal["bfloat16", "float16", "float32"]
    quantization: Literal["none", "int8", "int4", "w8a8"]
    model_impl: Literal["auto", "quintet", "transformers"]
    threads: int
    max_rows: int
    context: int
    max_steps: int


def open_model(folder: Path, hf_config: Mapping[str, Any], setup: Setup) -> tuple[EngineConfig, Worker]:
    """Write the config and load it as `quintet serve --load-format dummy` does. Raises `ConfigError`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    (folder / "tokenizer.json").write_text("{}")
    options = Options(
        model=str(folder),
        dtype=setup.dtype,
        device="cpu",
        load_format="dummy",
        block_size=BLOCK_SIZE,
        max_model_len=setup.context + setup.max_steps + BLOCK_SIZE,
        max_num_seqs=setup.max_rows,
        threads=setup.threads,
        model_impl=setup.model_impl,
        quantization=setup.quantization,
    )
    config = resolve(options, Path(tempfile.gettempdir()), http=False).config  # no process: no sockets
    blocks = setup.max_rows * len(config.model.kv.groups) * -(-config.model.max_model_len // BLOCK_SIZE) + 1
    config = msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(config.cache, memory_bytes=blocks * config.model.kv.bytes_per_block),
        executor=msgspec.structs.replace(config.executor, seed=1),
    )
    worker = make_worker(config)
    assert isinstance(worker, Worker)
    while worker.has_idle_tasks:  # a server runs these in its first idle seconds
        worker.run_idle_task()
    return config, worker


class Decoding:
    """A worker with ``num_rows`` decoding requests that begin with ``context`` tokens."""

    def __init__(self, config: EngineConfig, worker: Worker, num_rows: int, context: int) -> None:
        model = config.model
        self._model, self._worker = model, worker
        self._num_rows, self._context = num_rows, context
        worker.reset()
        self._steps = Steps(num_rows, context, 1, model.vocab_size, model.max_model_len, len(model.kv.groups))
        worker.execute(self._steps.next(advance=False))
        worker.execute(self._steps.next())

    def step_s(self) -> float:
        """Run a step and return its time in seconds."""
        plan = self._steps.next()
        begin_s = time.perf_counter()
        self._worker.execute(plan)
        return time.perf_counter() - begin_s

    def step_bytes(self) -> int:
        """Return the bytes that the last step moved: weights, with chosen experts only; KV reads; state reads and writes."""
        runner, kv = self._worker.runner, self._model.kv
        if isinstance(runner, HostRunner):
            return runner.weight_bytes + kv.bytes_per_token * self._context * self._num_rows
        assert isinstance(runner, ProgramRunner), runner
        parts = balance_of(runner, [self._context] * self._num_rows, [1] * self._num_rows, 1)
        return sum(part.bytes - part.bytes_again for part in parts)

    def operations(self, repetitions: int) -> dict[str, tuple[int, float]]:
        """Return for each operation its number of runs in a step and their total seconds, longest first.

        Operations are timed separately. Times are medians over ``repetitions`` steps. Empty without a recorded program.
        """
        runner = self._worker.runner
        if not isinstance(runner, ProgramRunner):
            return {}
        plan = self._steps.next(advance=False)
        rows = Rows(plan)
        spent: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(repetitions)])
        for step in range(repetitions):
            for name, step_s in profile(runner, rows, self._worker.tables, rows.offsets):
                spent[name][step].append(step_s)
        whole = {name: (len(steps[0]), statistics.median(map(sum, steps))) for name, steps in spent.items()}
        return dict(sorted(whole.items(), key=lambda item: -item[1][1]))
