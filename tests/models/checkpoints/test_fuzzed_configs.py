"""Configs with invalid values: each is rejected in one line, or is a model that computes.

The seed determines all draws. `tests.models.checkpoints.invalid_values` runs each config.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.checkpoints.invalid_values import SMALL, invalid_value, load_and_run, without_hf_config
from tests.models.test_equal import ROWS

from quintet.executor.model_config.registry import FAMILIES

OPTIONAL: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factor": 0.5,
    "quantization_config": None,
    "original_max_position_embeddings": 32,
    "alibi": True,
    "attention_layers": ["global", "local"],
    "attn_config": {"alibi": False, "clip_qkv": 2.0, "softmax_scale": 0.2},
    "attn_logit_softcapping": 50.0,
    "bias": True,
    "clip_qkv": 8.0,
    "do_layer_norm_before": False,
    "final_logit_softcapping": 30.0,
    "first_k_dense_replace": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "logit_scale": 0.06,
    "multi_query": False,
    "n_inner": 40,
    "new_decoder_architecture": True,
    "no_rope_layer_interval": 2,
    "num_experts_per_tok": 2,
    "num_kv_heads": 2,
    "num_ln_in_parallel_attn": 1,
    "num_local_experts": 4,
    "parallel_attn": False,
    "qk_layernorm": True,
    "query_pre_attn_scalar": 24,
    "residual_multiplier": 0.5,
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "scale_attn_by_inverse_layer_idx": True,
    "sliding_window_pattern": 2,
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
    "use_parallel_residual": False,
    "word_embed_proj_dim": 16,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2,
     "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "yarn", "attention_factor": 1.3, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8,
     "long_factor": [1.5] * 8},
]  # fmt: skip
SPELLED_LIKE = {
    "InternLM3ForCausalLM": ("LlamaForCausalLM", False),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", True),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", True),
}
"""Architectures that share neither a row nor a reader with one that has: the architecture of the same config, and whether it
nests the config as its text model.
"""
ConfigJsons = dict[str, list[dict[str, Any]]]


def a_hf_config(draw: random.Random) -> dict[str, Any]:
    """Return a config with a few wrong values, or none."""
    hf_config = {**SMALL, "architectures": [draw.choice(sorted(FAMILIES))]}
    hf_config |= {key: value for key, value in OPTIONAL.items() if draw.random() < 0.15}
    if draw.random() < 0.7:
        hf_config[draw.choice(["rope_parameters", "rope_scaling"])] = dict(draw.choice(ROPES))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        inner = [
            hf_config[key]
            for key in ("rope_parameters", "rope_scaling")
            if isinstance(hf_config.get(key), dict)
        ]
        where = draw.choice(inner) if inner and draw.random() < 0.4 else hf_config
        key = draw.choice(sorted(where)) if where else "rope_type"
        if draw.random() < 0.15:
            where.pop(key, None)
        else:
            where[key] = invalid_value(draw, where.get(key))
    return hf_config


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> ConfigJsons:
    """Return valid configs: at least one of every architecture, with all its keys."""
    anything = transformers.PretrainedConfig().to_dict()
    hf_configs: ConfigJsons = {}
    for row in ROWS.values():
        folder = tmp_path_factory.mktemp("hf_config")
        row.make(folder)
        hf_config = json.loads((folder / "config.json").read_bytes()) | dict(row.hf_config)
        own = {
            key: value for key, value in hf_config.items() if key not in anything or value != anything[key]
        }
        hf_configs.setdefault(hf_config["architectures"][0], []).append(own)
    for architecture, family in FAMILIES.items():
        alike = next((each for each in hf_configs if FAMILIES[each].read is family.read), None)
        inner, text = SPELLED_LIKE.get(architecture, (alike, False))
        for hf_config in hf_configs[inner] if architecture not in hf_configs and inner is not None else ():
            spelled = {"text_config": hf_config} if text else hf_config
            hf_configs.setdefault(architecture, []).append(spelled | {"architectures": [architecture]})
    return hf_configs


def places_of(value: object) -> list[tuple[Any, Any]]:
    """Return every key of a config and of nested values, and every index, each with its container."""
    if isinstance(value, dict):
        own = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, at) for at in range(len(value))]
    else:
        return []
    return own + [place for inner, key in own for place in places_of(inner[key])]


def a_hf_config_of(draw: random.Random, hf_configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one of the configs with a few wrong values, or none, at any depth."""
    hf_config: dict[str, Any] = copy.deepcopy(draw.choice(hf_configs))
    hf_config["dtype"] = draw.choice(["bfloat16", "float16", "float32"])
    for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 3])):
        where, key = draw.choice([place for place in places_of(hf_config) if place[1] != "architectures"])
        if draw.random() < 0.15:
            where.pop(key)
        else:
            where[key] = invalid_value(draw, where[key])
    return hf_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return without_hf_config(tmp_path)


def fuzz_hf_configs(
    folder: Path, seeds: Iterable[int], make: Callable[[random.Random], dict[str, Any]] = a_hf_config
) -> tuple[int, int]:
    """Try a config of each seed; return the numbers of rejected and of computed ones."""
    refused = computed = 0
    for seed in seeds:
        draw = random.Random(seed)
        (folder / "config.json").write_text(json.dumps(make(draw)))
        try:
            refusal = load_and_run(folder, draw.choice([4, 16]), load_format="dummy")
        except Exception as error:
            error.add_note(f"seed {seed}: {(folder / 'config.json').read_text()}")
            raise
        refused, computed = refused + (refusal is not None), computed + (refusal is None)
    return refused, computed


def test_invalid_config_is_rejected_or_computes(folder: Path) -> None:
    refused, computed = fuzz_hf_configs(folder, range(120))
    assert refused > 30 and computed > 30


def fuzz_families(folder: Path, working: ConfigJsons, seeds: range) -> tuple[int, int]:
    """Try configs of every family in turn."""
    names = sorted(working)
    tried = [
        fuzz_hf_configs(folder, [seed], partial(a_hf_config_of, hf_configs=working[names[seed % len(names)]]))
        for seed in seeds
    ]
    return sum(refused for refused, _ in tried), sum(computed for _, computed in tried)


def test_every_architecture_has_a_valid_config(folder: Path, working: ConfigJsons) -> None:
    assert working.keys() == FAMILIES.keys()
    for hf_configs in working.values():
        (folder / "config.json").write_text(json.dumps(hf_configs[0]))
        assert load_and_run(folder, 16, load_format="dummy") is None, hf_configs[0]


def test_invalid_config_of_any_family_is_rejected_or_computes(folder: Path, working: ConfigJsons) -> None:
    refused, computed = fuzz_families(folder, working, range(len(working)))
    assert refused > 30 and computed > 30


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
MANY = 10**400


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("GPTNeoForCausalLM", {"attention_layers": [["global"]] * 3}, "words, each global or local"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [MANY, 1.0, 1.0, 1.0, 1.0]}, "a list of 5 numbers"),
        (
            "FalconH1ForCausalLM",
            {"ssm_multipliers": [float("nan"), 1.0, 1.0, 1.0, 1.0]},
            "a list of 5 numbers",
        ),
        ("Mamba2ForCausalLM", {"time_step_limit": [MANY, MANY]}, "two numbers, the smaller one first"),
        ("Mamba2ForCausalLM", {"time_step_limit": [0.0, MANY]}, None),
        ("MptForCausalLM", {"attn_config": {"clip_qkv": 1e6}}, None),
        ("GptOssForCausalLM", {"swiglu_limit": 1e6}, None),
        ("GptOssForCausalLM", {"intermediate_size": 33, **MXFP4}, "multiple of 32"),
        ("GptOssForCausalLM", {"hidden_size": 48, **MXFP4}, "multiple of 32"),
    ],
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_previously_found_hf_configs(
    folder: Path,
    working: ConfigJsons,
    architecture: str,
    changes: dict[str, Any],
    words: str | None,
    block_size: int,
) -> None:
    """By torch, with smaller blocks, and by the kernels: in fp16, which does not hold every bound."""
    hf_config = working[architecture][0] | {"dtype": "float16"}
    for key, value in changes.items():
        hf_config[key] = hf_config[key] | value if key in hf_config and isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(hf_config))
    refusal = load_and_run(folder, block_size, load_format="dummy")
    assert refusal is None if words is None else refusal is not None and words in refusal


def test_config_unsupported_by_transformers_is_rejected(folder: Path, working: ConfigJsons) -> None:
    """It builds the model, and fails in the middle of a forward pass."""
    hf_config = working["DeepseekV2ForCausalLM"][0] | {"architectures": ["Unknown"], "num_key_value_heads": 5}
    (folder / "config.json").write_text(json.dumps(hf_config))
    refusal = load_and_run(folder, 16, load_format="dummy")
    assert refusal is not None and "a test pass failed: RuntimeError" in refusal


@pytest.mark.parametrize("name", ["", "x" * 500])
def test_invalid_name_is_rejected(folder: Path, working: ConfigJsons, name: str) -> None:
    (folder / "config.json").write_text(
        json.dumps(working["FalconForCausalLM"][0] | {"architectures": [name]})
    )
    refusal = load_and_run(folder, 16, load_format="dummy")
    assert refusal is not None and "has neither `architectures` nor `model_type`" in refusal


@pytest.mark.whole
@pytest.mark.parametrize("part", range(12))
def test_many_invalid_configs_of_all_families(folder: Path, working: ConfigJsons, part: int) -> None:
    fuzz_families(folder, working, range(10_000 + 500 * part, 10_500 + 500 * part))


def test_heads_of_one_number_compute(folder: Path) -> None:
    hf_config = {**SMALL, "architectures": ["BioGptForCausalLM"], "head_dim": 1}
    (folder / "config.json").write_text(json.dumps(hf_config))
    assert load_and_run(folder, 4, load_format="dummy") is None


def test_long_value_is_shortened_in_the_error(folder: Path) -> None:
    hf_config = {**SMALL, "architectures": ["LlamaForCausalLM"], "dtype": "x" * 5000}
    (folder / "config.json").write_text(json.dumps(hf_config))
    refusal = load_and_run(folder, 4, load_format="dummy")
    assert refusal is not None and "x" * 20 in refusal


@pytest.mark.whole
@pytest.mark.parametrize("part", range(8))
def test_many_invalid_hf_configs(folder: Path, part: int) -> None:
    fuzz_hf_configs(folder, range(1000 + 500 * part, 1500 + 500 * part))
