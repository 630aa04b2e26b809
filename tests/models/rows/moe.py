"""Mixture-of-experts models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.checkpoints.renamed import Stacks, renamed, with_vision
from tests.models.random_checkpoints import Logits, Row, batched_logits, of_transformers
from tests.models.rows.reference import SWIGLU_LIMIT

SMALL: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GRANITE: dict[str, Any] = {
    "num_local_experts": 9,
    "num_experts_per_tok": 4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

LING_2: dict[str, Any] = {
    "n_routed_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
LING = (
    ("embed_tokens", "word_embeddings"),
    (r"self_attn\.qkv", "attention.query_key_value"),
    (r"self_attn\.o_proj", "attention.dense"),
)
QKV = {"self_attn.qkv.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"]}

GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "intermediate_size": 96,
    "sliding_window": 11,
    "swiglu_limit": SWIGLU_LIMIT,
    "pad_token_id": 0,
}

LLAMA4: dict[str, Any] = {
    "num_local_experts": 5,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 72,
    "attention_chunk_size": 13,
    "floor_scale": 7,
    "pad_token_id": 0,
}


def gpt_oss_in_4_bits(folder: Path) -> Logits:
    """Write a checkpoint with microscaled 4-bit experts; the reference computes with their values."""
    of_transformers("GptOssConfig", **GPT_OSS).make(folder)
    tensors = load_file(folder / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    parameters = dict(model.named_parameters())
    draw = torch.Generator().manual_seed(5)
    stacked = ("experts.gate_up_proj", "experts.down_proj")
    for name in [name for name in tensors if name.endswith(stacked)]:
        experts, depth, columns = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, columns, depth // 32, 32), generator=draw)
        exponents = torch.randint(120, 124, (experts, columns, depth // 32), generator=draw)
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8]
        numbers = torch.where(codes < 8, magnitudes, -magnitudes) * 2.0 ** (exponents[..., None] - 127)
        parameters[name].data.copy_(numbers.flatten(2).transpose(1, 2))
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = exponents.to(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    hf_config = json.loads((folder / "config.json").read_bytes())
    hf_config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(hf_config))
    return batched_logits(model)


def granite_as(
    hf_config: dict[str, Any], names: Sequence[tuple[str, str]], stacked: Stacks | None = None
) -> Row:
    """Return Granite's layer without its factors: normalised weights of the chosen experts equal a softmax over all."""

    def make(folder: Path) -> Logits:
        settings = {
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "intermediate_size": 40,
            "attention_multiplier": 0.25,
        }
        logits = of_transformers("GraniteMoeSharedConfig", shared_intermediate_size=80, **settings).make(
            folder
        )
        tensors = load_file(folder / "model.safetensors")
        for layer in range(3):
            begin, moe = f"model.layers.{layer}.", f"model.layers.{layer}.block_sparse_moe."
            gates, ups = tensors.pop(f"{moe}input_linear.weight").chunk(2, dim=1)
            kinds = {"gate": gates, "up": ups, "down": tensors.pop(f"{moe}output_linear.weight")}
            for kind, experts in kinds.items():
                for expert, weight in enumerate(experts):
                    tensors[f"{begin}mlp.experts.{expert}.{kind}_proj.weight"] = weight.clone()
            shared = tensors.pop(f"{begin}shared_mlp.input_linear.weight").chunk(2)
            kinds = {
                "gate": shared[0],
                "up": shared[1],
                "down": tensors.pop(f"{begin}shared_mlp.output_linear.weight"),
            }
            for kind, weight in kinds.items():
                tensors[f"{begin}mlp.shared_experts.{kind}_proj.weight"] = weight.clone()
            tensors[f"{begin}mlp.gate.weight"] = tensors.pop(f"{moe}router.layer.weight")
        save_file(tensors, folder / "model.safetensors")
        return logits

    experts = {"n_routed_experts": 9, "num_experts": 9, "moe_intermediate_size": 40, "norm_topk_prob": True}
    return renamed(
        Row(make),
        {**experts, "num_shared_experts": 2, "first_k_dense_replace": 0} | hf_config,
        names,
        stacked,
    )


_ROWS: dict[str, Row] = {
    "ernie 4.5 moe": of_transformers(
        "Ernie4_5_MoeConfig", moe_num_experts=9, moe_k=3, moe_intermediate_size=40, moe_layer_interval=2
    ),
    "hunyuan moe": of_transformers("HunYuanMoEV1Config", num_experts=7, moe_topk=3, head_dim=16),
    "phi moe": of_transformers(
        "PhimoeConfig", num_local_experts=6, router_jitter_noise=0.3, attention_bias=True
    ),
    "phi moe, stretched": of_transformers(
        "PhimoeConfig",
        num_local_experts=6,
        lm_head_bias=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [2.0] * 8,
            "short_mscale": 1.3,
            "long_mscale": 1.3,
        },
    ),
    "flex olmo": of_transformers("FlexOlmoConfig", num_experts=7, num_experts_per_tok=3, pad_token_id=0),
    "minimax m2": of_transformers(
        "MiniMaxM2Config", num_local_experts=8, num_experts_per_tok=3, head_dim=32, rotary_dim=16
    ),
    "mixtral": of_transformers("MixtralConfig", num_local_experts=5),
    "qwen2 moe": of_transformers(
        "Qwen2MoeConfig", num_experts=9, shared_expert_intermediate_size=72, norm_topk_prob=True, **SMALL
    ),
    "qwen3 moe, some layers without experts": of_transformers(
        "Qwen3MoeConfig", num_experts=12, head_dim=32, decoder_sparse_step=2, norm_topk_prob=True, **SMALL
    ),
    "olmoe": of_transformers("OlmoeConfig", num_experts=8, num_experts_per_tok=3, pad_token_id=0),
    "granite moe": of_transformers("GraniteMoeConfig", **GRANITE),
    "granite moe, shared expert": of_transformers(
        "GraniteMoeSharedConfig", shared_intermediate_size=48, **GRANITE
    ),
    "glm4 moe": of_transformers(
        "Glm4MoeConfig",
        **SMALL,
        n_routed_experts=12,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
    ),
    "glm4 moe, as dots": of_transformers(
        "Dots1Config",
        **SMALL,
        n_routed_experts=12,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        sliding_window=11,
        max_window_layers=2,
    ),
    "glm4 moe, as solar open": of_transformers(
        "SolarOpenConfig", **SMALL, head_dim=32, n_routed_experts=12, attention_bias=True
    ),
    "glm4 moe, as exaone": of_transformers(
        "ExaoneMoeConfig", **SMALL, num_experts=12, sliding_window=11, sliding_window_pattern=3
    ),
    "glm4 moe, as ling 2": renamed(
        of_transformers("Glm4MoeConfig", **SMALL, **LING_2),
        {
            "architectures": ["BailingMoeV2ForCausalLM"],
            "num_experts": 12,
            "num_shared_experts": 1,
            "head_dim": 16,
        },
        (
            *LING,
            (r"self_attn\.q_norm", "attention.query_layernorm"),
            (r"self_attn\.k_norm", "attention.key_layernorm"),
            ("e_score_correction_bias", "expert_bias"),
        ),
        QKV,
    ),
    "granite moe, as deepseek 1": granite_as({"architectures": ["DeepseekForCausalLM"]}, ()),
    "granite moe, as ling": granite_as({"architectures": ["BailingMoeForCausalLM"]}, LING, QKV),
    "gpt-oss": of_transformers("GptOssConfig", **GPT_OSS),
    # Numbers of 4 bits are multiplied with activations of 16, in groups of 256 inputs.
    "gpt-oss, 4 bits": Row(gpt_oss_in_4_bits, close=6e-4),
    "llama4": of_transformers("Llama4TextConfig", **LLAMA4),
    "llama4, with vision": with_vision(
        of_transformers("Llama4TextConfig", **LLAMA4),
        "Llama4ForConditionalGeneration",
        "language_model.model.",
    ),
}

_LESS = {
    "phi moe": (0.5, 0.3),  # weights are near 1 for every choice
    "glm4 moe, as": (0.95, 0.5),
}
ROWS = {
    name: replace(row, quantized=next((_LESS[key] for key in _LESS if name.startswith(key)), row.quantized))
    for name, row in _ROWS.items()
}
"""See `Row.quantized`: some rows lie closer to another choice of experts than others."""
