"""What a rank that is not the first does all its life: whatever rank 0 tells it, over the step that rank 0 shows it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import torch

from quintet.executor.features.kv_offload import HostBlocks
from quintet.executor.parallel.boot import open_ranks
from quintet.executor.parallel.library import OrderKind
from quintet.executor.parallel.ranks import Ranks
from quintet.executor.platforms.platform import Platform, open_platform
from quintet.executor.program.runner import ProgramRunner
from quintet.executor.worker import CHORE_S, load_model, make_runner, num_blocks_of
from quintet.process.runtime import give_back_memory
from quintet.wire.config import EngineConfig


def follow_for_ever(config: EngineConfig, descriptor: int, rank: int) -> None:
    """Be a rank whose process has taken its processors, until it is killed. descriptor: of the memory that all share."""
    platform = open_platform(config.executor)
    for _ in follow(config, platform, open_ranks(config, descriptor, rank)):
        pass


def follow(config: EngineConfig, platform: Platform, ranks: Ranks) -> Iterator[OrderKind]:
    """Load the rank's share, say so, and carry out orders for ever; yield what each was. config: with the rank's threads."""
    model = load_model(config, platform, share=ranks.share)
    runner = make_runner(model, config, platform, num_blocks_of(config), ranks=ranks)
    assert isinstance(runner, ProgramRunner), runner
    gc.freeze()
    give_back_memory()
    ranks.done()
    pages, num_host_blocks = model.weights.reservation, config.model.kv.num_blocks(config.cache.swap_bytes)
    host_blocks = HostBlocks(runner.blocks, num_host_blocks)
    while True:
        order = ranks.hear(runner.step_address)
        kind = OrderKind(order.kind)
        match kind:
            case OrderKind.RUN:
                runner.run_told(order.begin, order.end, order.length)
            case OrderKind.COPY_BLOCKS:
                pairs = np.frombuffer(ranks.mail(order), np.int32).reshape(-1, 2).astype(np.int64)
                runner.copy_blocks(*(torch.from_numpy(column.copy()) for column in pairs.T))
            case OrderKind.SWAP_OUT:
                host_blocks.copy_out(ranks.mail(order))
            case OrderKind.SWAP_IN:
                host_blocks.copy_in(ranks.mail(order))
            case OrderKind.EMBEDS:
                runner.put_told(ranks.mail(order))
            case OrderKind.CHORE:
                pass
        ranks.done()
        if kind is OrderKind.CHORE and pages is not None and pages.is_scattered:
            pages.gather(CHORE_S)  # behind it: rank 0 does its own meanwhile
        yield kind
