"""One process's views of the memory that it shares with others, for a configured model."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.executor.cards.card import card_of
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.share import LINK_DEPTH, Share, results_depth, share_of
from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.parallel.library import CRanksShape
from quintet.executor.parallel.links import HEARER, TELLER, Links
from quintet.executor.parallel.ranks import SPINS, Ranks, shape_of
from quintet.executor.program.stage import most_outputs
from quintet.wire.config import DTYPE_BYTES, EngineConfig, ModelConfig


def share_of_rank(config: EngineConfig, rank: int) -> Share:
    """Return what a rank has of a model that was found to be divisible."""
    return share_of(config.executor, rank, spec_of(config.model))


def open_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Return the view of a rank whose process has taken its processors. descriptor: of the memory of its stage's ranks."""
    shape = shape_of(
        config, spec_of(config.model), most_outputs(config.scheduler), DTYPE_BYTES[config.model.dtype]
    )
    return Ranks(descriptor, share_of_rank(config, rank), shape, spins=_spins(config))


def open_links(config: EngineConfig, descriptors: Sequence[int], stage: int) -> Links:
    """Return the views of the first rank of a stage."""
    ends = ((stage - 1) % len(descriptors), HEARER), (stage, TELLER)
    before, behind = (
        Ranks(descriptors[link], end, link_shape(config, link), spins=_spins(config)) for link, end in ends
    )
    return Links(before, behind)


def link_shape(config: EngineConfig, link: int) -> CRanksShape:
    """Return what a link needs room for: the hidden states of a step, or the logits."""
    spec, item_bytes = spec_of(config.model), DTYPE_BYTES[config.model.dtype]
    num_outputs, num_stages = most_outputs(config.scheduler), config.executor.pipeline_parallel_size
    shape = shape_of(config, spec, num_outputs, item_bytes)
    shape.ranks, shape.depth = 2, LINK_DEPTH
    shape.sums_width = shape.logits_row_bytes = shape.rotated_row_bytes = shape.gathered_row_bytes = 0
    shape.experts_row_bytes = shape.staging_bytes = shape.kv_bytes = shape.kv_copies = 0
    shape.query_row_bytes = shape.partial_floats = 0
    if link == num_stages - 1:
        shape.depth = results_depth(num_stages)
        shape.payload_bytes = num_outputs * config.model.vocab_size * item_bytes
    return shape


def spec_of(model: ModelConfig) -> DecoderSpec:
    """Return what a model is made of that was found to be divisible."""
    spec = FAMILIES[model.architecture].read(card_of(model))
    assert isinstance(spec, DecoderSpec), model.architecture
    return spec


def _spins(config: EngineConfig) -> int:
    return SPINS if config.executor.has_own_cores else 0
