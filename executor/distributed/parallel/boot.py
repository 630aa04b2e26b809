"""Open one process's views of shared memory for a configured model."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.executor.distributed.parallel.links import RECEIVER, SENDER, Links
from quintet.executor.distributed.parallel.ranks import SPINS, Ranks
from quintet.executor.distributed.parallel.shapes import link_shape, shape_of, spec_of
from quintet.executor.model_config.share import Share, share_of
from quintet.wire.config import EngineConfig


def share_of_rank(config: EngineConfig, rank: int) -> Share:
    """Return the share of a rank of a divisible model."""
    return share_of(config.executor, rank, spec_of(config.model))


def open_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Return the view of a rank with assigned processors. descriptor: memory of its stage's ranks."""
    return Ranks(descriptor, share_of_rank(config, rank), shape_of(config), spins=_spins(config))


def open_links(config: EngineConfig, descriptors: Sequence[int], stage: int) -> Links:
    """Return the link views of a stage's first rank."""
    ends = ((stage - 1) % len(descriptors), RECEIVER), (stage, SENDER)
    preceding, following = (
        Ranks(descriptors[link], end, link_shape(config, link), spins=_spins(config)) for link, end in ends
    )
    return Links(preceding, following)


def _spins(config: EngineConfig) -> int:
    return SPINS if config.executor.has_own_cores else 0
