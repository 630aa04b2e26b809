"""Whether a model can be divided over ranks (``--tensor-parallel-size``), and what one of them has."""

from __future__ import annotations

import dataclasses
import sys

from quintet.deploy.resolve.card import ModelFacts
from quintet.deploy.resolve.flags import Options
from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.share import MOST_RANKS, Share, misfit, sizes_that_fit, why_not
from quintet.executor.cards.spec import DecoderSpec
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import parse_json
from quintet.wire.model_files import card_path

FLAG = "--tensor-parallel-size"


def check_flags(options: Options, device: str) -> None:
    """Reject what ranks do not do."""
    size = options.tensor_parallel_size
    if size == 1:
        return
    if size > MOST_RANKS:
        raise ConfigError(f"{FLAG} is {size}; at most {MOST_RANKS} ranks compute a model")
    if options.executor == "mock":
        raise ConfigError(
            f"{FLAG} {size}: the mock executor computes nothing that could be divided; drop one of the two"
        )
    if sys.platform != "linux":
        raise ConfigError(
            f"{FLAG} {size}: ranks share memory as Linux has it, and this is {sys.platform}; drop it"
        )
    if device != "cpu":
        raise ConfigError(
            f"{FLAG} {size}: models are divided on the CPU only so far; add --device cpu or drop it"
        )


def of_one_rank(options: Options, facts: ModelFacts) -> ModelFacts:
    """Return what one rank keeps of every token; reject a model that so many ranks cannot share, with the numbers that can."""
    size = options.tensor_parallel_size
    if size == 1:
        return facts
    path = card_path(facts.path)
    spec = _spec_of(facts)
    reason = "only the layers of Quintet's own models are" if spec is None else why_not(spec)
    if facts.stored is not None:
        reason = f"weights stored as {facts.stored.name} are not divided yet"
    if spec is None or reason is not None:
        raise ConfigError(f"{FLAG} {size}: {path} cannot be divided: {reason}; drop the flag")
    odd = misfit(spec, size)
    if odd is not None:
        fitting = ", ".join(map(str, sizes_that_fit(spec))) or "none but 1"
        raise ConfigError(
            f"{FLAG} {size}: {path} has {odd}, which {size} ranks cannot share; sizes that fit: {fitting}"
        )
    share = Share(0, size)
    needs = (
        None
        if need is None
        else dataclasses.replace(need, num_kv_heads=share.of_kv_heads(need.num_kv_heads).count)
        for need in facts.kv_needs
    )
    return dataclasses.replace(facts, kv_needs=tuple(needs))


def _spec_of(facts: ModelFacts) -> DecoderSpec | None:
    family = FAMILIES.get(facts.architecture)
    if facts.implementation != "quintet" or family is None:
        return None
    path = card_path(facts.path)
    spec = family.read(ModelCard(parse_json(facts.card, path), str(path)))
    return spec if isinstance(spec, DecoderSpec) else None
