"""Every row of the registry: what its reader says is what its builder makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.registry import FAMILIES, nearest
from quintet.executor.models.model import Setting
from quintet.executor.models.registry import build_model
from quintet.executor.quant.none import Unquantized
from quintet.wire.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
}
"""What a card cannot leave out; all else is the family's own default."""
MORE: dict[str, dict[str, Any]] = {
    "GPTNeoForCausalLM": {"attention_layers": ["global", "local"] * 6},
    "Mistral3ForConditionalGeneration": {"text_config": SIZES},
}
"""By architecture: what its card cannot leave out either."""


def card_of(architecture: str) -> ModelCard:
    return ModelCard(SIZES | MORE.get(architecture, {}), "config.json")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_parameters_that_a_spec_counts_are_those_that_the_model_declares(architecture: str) -> None:
    """`deploy` counts memory for weights by them, before there are any."""
    card = card_of(architecture)
    spec = FAMILIES[architecture].read(card)
    device = torch.device("meta")
    model = build_model(architecture, card, Setting(device, torch.bfloat16, Unquantized()))
    declared = sum(
        math.prod(expected.shape)
        for name, expected in model.weights.expected.items()
        if len(expected.shape) > 1 and "norm" not in name
    )
    assert spec.num_parameters == declared
    assert len(spec.kv_needs) == SIZES["num_hidden_layers"]


def test_an_unknown_architecture_is_told_the_nearest() -> None:
    assert nearest("LlamaForSequenceClassification") == "LlamaForCausalLM"
    assert nearest("Qwen2_ForCausalLM") == "Qwen2ForCausalLM"
    assert nearest("GPT2") == "GPT2LMHeadModel" or "GPT2LMHeadModel" not in FAMILIES
    assert nearest("%$") is None
    with pytest.raises(ConfigError, match=r"'LlamaForCausalLm' is none of .*nearest .* LlamaForCausalLM"):
        build_model(
            "LlamaForCausalLm",
            card_of(""),
            Setting(torch.device("meta"), torch.bfloat16, Unquantized()),
        )
