"""Every row of the registry: the spec of its reader matches the model of its builder."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.documented_families import SIZES, hf_config_of

from quintet.executor.checkpoints.quant.packed import Unquantized
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.models.model import Setting, build_model
from quintet.wire.errors import ConfigError


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parameter_count_of_the_spec_equals_the_model(architecture: str) -> None:
    """`deploy` counts memory for weights by the spec, before they exist."""
    hf_config = hf_config_of(architecture)
    spec = FAMILIES[architecture].read(hf_config)
    device = torch.device("meta")
    model = build_model(architecture, hf_config, Setting(device, torch.bfloat16, Unquantized()))
    declared = sum(
        math.prod(expected.shape)
        for name, expected in model.weights.expected.items()
        if len(expected.shape) > 1 and "norm" not in name
    )
    assert spec.num_parameters == declared
    assert len(spec.kv_needs) == SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        *itertools.product(
            [
                "Gemma3ForConditionalGeneration",
                "Mistral3ForConditionalGeneration",
                "Gemma3ForCausalLM",
                "MistralForCausalLM",
            ],
            ["model.language_model.", "language_model.model.", "model."],
        ),
        *itertools.product(
            ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
            ["model.language_model.", "model."],
        ),
    ],
)
def test_text_part_has_the_names_of_any_version_of_transformers(architecture: str, prefix: str) -> None:
    setting = Setting(torch.device("meta"), torch.bfloat16, Unquantized())
    weights = build_model(architecture, hf_config_of(architecture), setting).weights
    entries = {
        name.replace("model.", prefix, 1): Entry("BF16", each.shape, 0, 0)
        for name, each in weights.expected.items()
    }
    before = prefix.partition("language")[0]
    parts = ("visual.patch_embed", "vision_tower.vision_model.head", "multi_modal_projector.mm_soft_emb_norm")
    vision = {f"{before}{each}.weight": Entry("BF16", (4, 4), 0, 0) for each in parts}
    file: Any = SimpleNamespace(path=Path("model.safetensors"), entries=entries | vision)
    assert list(expected_names(weights, [file]).values()) == list(weights.expected)


def test_unknown_architecture_error_names_the_nearest() -> None:
    assert nearest("LlamaForSequenceClassification") == "LlamaForCausalLM"
    assert nearest("Qwen2_ForCausalLM") == "Qwen2ForCausalLM"
    assert nearest("GPT2") == "GPT2LMHeadModel" or "GPT2LMHeadModel" not in FAMILIES
    assert nearest("%$") is None
    assert nearest("Llama5ForCausalLM") == "Llama4ForCausalLM"
    assert nearest("LlamaxForCausalLM") == "LlamaForCausalLM"
    assert nearest("Qwen1_5ForCausalLM") == "QWenLMHeadModel"
    assert nearest("Qwen9ForCausalLM") == "Qwen3_5ForCausalLM"
    assert nearest("Qwen9MoeForCausalLM") == "Qwen3_5MoeForCausalLM"
    with pytest.raises(
        ConfigError, match=r"unsupported architecture 'LlamaForCausalLm'; the nearest .* LlamaForCausalLM"
    ):
        build_model(
            "LlamaForCausalLm",
            hf_config_of(""),
            Setting(torch.device("meta"), torch.bfloat16, Unquantized()),
        )
