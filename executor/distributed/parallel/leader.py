"""The worker of the leader (rank 0), which sends orders to the followers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quintet.executor.backends.platforms.platform import open_platform
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.distributed.parallel.pipeline import Pipeline
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.distributed.parallel.rank_views import Links, open_links, open_ranks, share_of_rank
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.interface import StepWorker
from quintet.executor.loading import load_model
from quintet.executor.worker import facts_of, make_stage, make_torch_worker, num_blocks_of
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig


def make_leader_worker(config: EngineConfig, span: Span, followers: FollowerProcesses) -> StepWorker:
    """Load the leader's share in parallel with the followers; return when all ranks are ready."""
    group = open_ranks(config, followers.groups[0], 0) if followers.groups else None
    gather_fds = followers.gather_fds
    if followers.links:
        return make_pipeline_worker(config, group, open_links(config, followers.links, 0), span, gather_fds)
    assert group is not None, "one process has no followers"
    worker = make_torch_worker(config, span, group, gather_fds)
    group.wait_for_all()
    hosts = config.executor.num_hosts
    worker.facts["ranks"] = str(config.executor.tensor_parallel_size) + f" on {hosts} hosts" * (hosts > 1)
    return worker


def make_pipeline_worker(
    config: EngineConfig,
    group: Ranks | None,
    links: Links,
    span: Span = no_span,
    gather_fds: Sequence[int] = (),
) -> PipelineWorker:
    """Load the first stage of a pipeline, like `make_leader_worker`. group: the stage's ranks, if there are several."""
    started, platform = time.monotonic(), open_platform(config.executor)
    share = share_of_rank(config, 0)
    model = load_model(config, platform, share=share)
    stage = make_stage(model, config, platform, share, group)
    pipeline = Pipeline(stage, config, links, span)
    facts = facts_of(config, platform, model.weights.num_bytes, started)
    num_blocks, pages = num_blocks_of(config), model.weights.reservation
    worker = PipelineWorker(pipeline, links, group, config, num_blocks, facts, span, pages, gather_fds)
    pipeline.wait_for_stages()
    hosts = config.executor.num_hosts
    worker.facts["ranks"] = f"{share.stages} stages of {share.size}" + f" on {hosts} hosts" * (hosts > 1)
    return worker
