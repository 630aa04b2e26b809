"""Registry of back ends, the ways to execute a model, and the choice among them. Imports no torch.

The first back end that can run the configured model on this machine makes the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.executor.backends.platforms.platform import import_string
from quintet.executor.context import RankMemory, WorkerContext
from quintet.executor.interface import StepWorker
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory

log = logging.getLogger(__name__)


class Unsupported(ConfigError):
    """A back end cannot run the model on this machine, but another one may. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to execute a model. Import strings, because most back ends import torch."""

    worker: str
    """``(context: WorkerContext) -> StepWorker``, on rank 0. Plans memory, loads the model and makes the worker.

    Raises `Unsupported` with the reason if it cannot run the model on this machine.
    """
    follower: str | None = None
    """``(context: WorkerContext, rank: int) -> None`` for each other rank; None: one rank only."""


BACKENDS = {
    "cpu": Backend(
        "quintet.executor.backends.cpu.backend:make_worker",
        "quintet.executor.distributed.parallel.follower_loop:run_follower",
    ),
    "cuda": Backend(
        "quintet.executor.backends.cuda.boot:make_worker",
        "quintet.executor.backends.cuda.ranks.follower:run_follower",
    ),
    "torch": Backend("quintet.executor.backends.torch.backend:make_worker"),
    "transformers": Backend("quintet.executor.backends.torch.fallback.boot:make_worker"),
    "mock": Backend("quintet.executor.mock:make_worker"),
}


def candidates(config: EngineConfig) -> list[str]:
    """Return the names of the back ends to try, in order."""
    executor = config.executor
    if executor.kind == "mock":
        return ["mock"]
    if config.model.implementation == "transformers":
        return ["transformers"]
    if executor.num_ranks > 1 or executor.sum_leaves > 1:
        return [executor.device]
    return [executor.device, "torch"] if executor.device in BACKENDS else ["torch"]


def import_backend(config: EngineConfig) -> None:
    """Import the module of the first candidate."""
    import_string(BACKENDS[candidates(config)[0]].worker)


def make_worker(
    config: EngineConfig,
    span: TraceSpan = no_span,
    memory: RankMemory = RankMemory(),  # noqa: B008 - immutable
    ahead: HugeMemory | None = None,
) -> StepWorker:
    """Return the worker of the configured model. Raises `ConfigError` if no back end can run it.

    memory: shared with the other ranks, if there are several. ahead: reserved for host weights.
    """
    context = WorkerContext(config, span, memory, ahead)
    *preferred, last = (BACKENDS[name] for name in candidates(config))
    for backend in preferred:
        try:
            return _open(backend, context)
        except Unsupported as why:
            if config.scheduler.speculative is not None:
                raise ConfigError(
                    f"--speculative-config is not supported where only torch can compute the model: drop it. The cause: {why}"
                ) from why
            log.warning("computing with torch's operators: %s", why)
    return _open(last, context)


def _open(backend: Backend, context: WorkerContext) -> StepWorker:
    make: Callable[[WorkerContext], StepWorker] = import_string(backend.worker)
    return make(context)


def run_follower(config: EngineConfig, span: TraceSpan, memory: RankMemory, rank: int) -> None:
    """Run a rank other than 0 until its process is killed."""
    path = BACKENDS[config.executor.device].follower
    assert path is not None, config.executor.device
    run: Callable[[WorkerContext, int], None] = import_string(path)
    run(WorkerContext(config, span, memory), rank)
