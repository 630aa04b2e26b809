"""Views of the memory that ranks share: of one rank, and of the links between pipeline stages.

Links connect each pipeline stage to the next, and the last to the first.

    stage 0 ── link 0: steps, hidden states ──▶ stage 1 ── … ──▶ stage M - 1
       ▲                                                             │
       └───────────────── link M - 1: logits ────────────────────────┘

A link is memory of two ranks without collectives. An order's payload is the input of the next stage. Two orders may
be in flight to a stage, so that it never waits between steps. As many orders as there are stages may be in flight to
the first stage, which takes logits when it needs them. It starts a step only after taking the logits of the step that
many before, which excludes a deadlock.

A link between two hosts has memory on both (`quintet.executor.distributed.hosts`); the stages work the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.executor.distributed.parallel.ranks import SPINS, Ranks
from quintet.executor.distributed.parallel.shapes import link_shape, shape_of, spec_of
from quintet.executor.model_config.share import Share, share_of
from quintet.wire.config import EngineConfig

SENDER, RECEIVER = Share(0, 2), Share(1, 2)


@dataclass(frozen=True, slots=True)
class Links:
    """The two links of one stage."""

    preceding: Ranks
    """Receives from the previous stage."""
    following: Ranks
    """Sends to the next stage."""


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
