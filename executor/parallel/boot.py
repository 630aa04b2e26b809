"""One rank's view of the memory that all share, for a configured model."""

from __future__ import annotations

from quintet.executor.cards.card import card_of
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.share import share_of
from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.parallel.ranks import SPINS, Ranks, shape_of
from quintet.executor.program.runner import most_outputs
from quintet.wire.config import EngineConfig, ModelConfig

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def open_ranks(config: EngineConfig, descriptor: int, rank: int) -> Ranks:
    """Return the view of a rank whose process has taken its processors. descriptor: of the memory."""
    share = share_of(config.executor, rank)
    item_bytes = DTYPE_BYTES[config.model.dtype]
    shape = shape_of(config, spec_of(config.model), most_outputs(config.scheduler), item_bytes)
    return Ranks(descriptor, share, shape, spins=SPINS if config.executor.has_own_cores else 0)


def spec_of(model: ModelConfig) -> DecoderSpec:
    """Return what a model is made of that was found to be divisible."""
    spec = FAMILIES[model.architecture].read(card_of(model))
    assert isinstance(spec, DecoderSpec), model.architecture
    return spec
