"""Worker of rank 0 of a model on several GPUs; it orders the other ranks to make the same launches."""

from __future__ import annotations

import time

from quintet.executor.backends.cuda.boot import make_device_worker
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ranks.group import group_of, open_device_ranks
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.backends.platforms.cuda import open_rank_device
from quintet.executor.backends.platforms.platform import open_platform
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.loading import MODEL_DTYPES, load_model
from quintet.executor.models.model import CausalModel
from quintet.executor.worker import facts_of
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig


def make_leader_worker(config: EngineConfig, span: Span, followers: FollowerProcesses) -> DeviceWorker:
    """Load rank 0's shard while the other ranks load theirs; return when all ranks are ready."""
    started = time.monotonic()
    platform = open_platform(config.executor)
    device = open_rank_device(config.executor)
    ranks = open_device_ranks(config, followers.groups[0], 0)
    model = load_model(config, platform, on_device=True, share=ranks.share)
    facts = facts_of(config, platform, model.weights.num_bytes, started)
    return lead(device, model, config, facts, ranks, span)


def lead(
    device: Device,
    model: CausalModel,
    config: EngineConfig,
    facts: dict[str, str],
    ranks: Ranks,
    span: Span = no_span,
) -> DeviceWorker:
    """Return the worker of a loaded shard; the other ranks run `quintet.executor.backends.cuda.ranks.follower.follow`."""
    group = group_of(device, ranks, config)
    dtype = MODEL_DTYPES[config.model.dtype]
    worker = make_device_worker(device, model, config, dtype, facts, span, group, ranks)
    ranks.wait_for_all()
    worker.facts["ranks"] = str(ranks.share.size)
    return worker
