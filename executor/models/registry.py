"""From a model card to the model."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.backends.platforms.platform import entry_point_path, import_string
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.model_config.spec import ModelSpec
from quintet.executor.models.model import CausalModel, Setting
from quintet.wire.errors import ConfigError


def build_model(architecture: str, card: ModelCard, setting: Setting) -> CausalModel:
    """Return the model, its weights not yet loaded.

    Third parties add theirs as entry points of the group ``quintet.models``, named after the architecture.
    """
    family = FAMILIES.get(architecture)
    if family is not None:
        builder: Callable[[ModelSpec, Setting], CausalModel] = import_string(family.builder)
        return builder(family.read(card), setting)
    path = entry_point_path("quintet.models", architecture)
    if path is None:
        near = nearest(architecture)
        raise ConfigError(
            f"{card.path}: architecture {architecture!r:.80} is none of Quintet's own"
            f"{f'; the nearest of those in docs/models.md is {near}' if near else ', which docs/models.md lists'}. What installed"
            " packages register under 'quintet.models' is taken as well; --model-impl transformers computes by transformers'"
            " layers where it knows the architecture"
        )
    build: Callable[[ModelCard, Setting], CausalModel] = import_string(path)
    return build(card, setting)
