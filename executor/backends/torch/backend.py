"""Torch back end: torch's operators on any device, without compiled kernels. One rank."""

from __future__ import annotations

from quintet.executor.backends.cpu.ops.host_dtypes import NARROW_KV
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.context import WorkerContext
from quintet.executor.interface import StepWorker
from quintet.executor.loading import MODEL_DTYPES
from quintet.executor.worker import Worker
from quintet.wire.errors import ConfigError


def make_worker(context: WorkerContext) -> StepWorker:
    """See `quintet.executor.backends.registry.Backend`."""
    config = context.config
    if config.cache.dtype in NARROW_KV:
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.dtype} needs the compiled kernels, which are not built or do not support the"
            f" model with block size {config.model.kv.block_size}: use --kv-cache-dtype model"
        )
    speculative = config.scheduler.speculative
    if speculative is not None and (speculative.draft is not None or config.model.kv.has_states):
        raise ConfigError(
            "--speculative-config: a draft model, and a model with recurrent states, need the compiled CPU kernels, which are"
            " not built or do not support the model: drop the flag, or use the method ngram without recurrent states"
        )
    model, kv = context.load(), context.reserve_kv(MODEL_DTYPES[config.model.dtype])
    return Worker(context, EagerRunner(model, context.platform.device, kv, context.span))
