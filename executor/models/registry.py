"""Build a model from its card."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.backends.platforms.platform import entry_point_path, import_string
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.model_config.spec import ModelSpec
from quintet.executor.models.model import CausalModel, Setting
from quintet.wire.errors import ConfigError


def build_model(architecture: str, card: ModelCard, setting: Setting) -> CausalModel:
    """Return the model, its weights not yet loaded. Raises `ConfigError` for an unsupported architecture.

    Packages can register models as entry points of the group ``quintet.models``, named after the architecture.
    """
    family = FAMILIES.get(architecture)
    if family is not None:
        builder: Callable[[ModelSpec, Setting], CausalModel] = import_string(family.builder)
        return builder(family.read(card), setting)
    path = entry_point_path("quintet.models", architecture)
    if path is None:
        near = nearest(architecture)
        raise ConfigError(
            f"{card.path}: unsupported architecture {architecture!r:.80}"
            f"{f'; the nearest supported one is {near}' if near else '; docs/models.md lists the supported ones'}. Install a"
            " package that registers it under 'quintet.models', or try --model-impl transformers, which runs the model in"
            " transformers"
        )
    build: Callable[[ModelCard, Setting], CausalModel] = import_string(path)
    return build(card, setting)
