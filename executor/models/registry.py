"""Architecture name, as in ``config.json``, to the function that builds the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from quintet.executor.models.model import CausalModel, ModelCard, Setting
from quintet.executor.platforms.platform import entry_point_path, import_string
from quintet.wire.errors import ConfigError

MODELS = {
    "LlamaForCausalLM": "quintet.executor.models.families:llama",
    "LLaMAForCausalLM": "quintet.executor.models.families:llama",
    "MistralForCausalLM": "quintet.executor.models.families:mistral",
    "Qwen2ForCausalLM": "quintet.executor.models.families:qwen2",
    "Qwen3ForCausalLM": "quintet.executor.models.families:qwen3",
}
"""Third parties add theirs as entry points of the group ``quintet.models``, named after the architecture."""


def read_card(folder: Path) -> ModelCard:
    """Read a model folder's ``config.json``."""
    path = folder / "config.json"
    try:
        return ModelCard(json.loads(path.read_bytes()), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: not found; a model folder needs it") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download it again") from error


def build_model(architecture: str, card: ModelCard, setting: Setting) -> CausalModel:
    """Return the model, its weights not yet loaded."""
    path = MODELS.get(architecture) or entry_point_path("quintet.models", architecture)
    if path is None:
        raise ConfigError(
            f"{card.path}: architecture {architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
            " and what installed packages register under 'quintet.models'"
        )
    build: Callable[[ModelCard, Setting], CausalModel] = import_string(path)
    return build(card, setting)
