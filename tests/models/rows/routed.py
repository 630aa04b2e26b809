"""Models of experts."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.random_checkpoints import Logits, Row, of_transformers

SMALL: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GRANITE: dict[str, Any] = {
    "num_local_experts": 9,
    "num_experts_per_tok": 4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "intermediate_size": 96,
    "sliding_window": 11,
    "swiglu_limit": 1.5,
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


def llama4_that_sees(folder: Path) -> Logits:
    """Write the text model's checkpoint as that of the whole: its tensors behind a prefix, its card inside another."""
    logits = of_transformers("Llama4TextConfig", **LLAMA4).make(folder)
    tensors = load_file(folder / "model.safetensors")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole["vision_model.class_embedding"] = torch.zeros(8)
    save_file(whole, folder / "model.safetensors")
    card = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": json.loads((folder / "config.json").read_bytes()),
    }
    (folder / "config.json").write_text(json.dumps(card))
    return logits


def gpt_oss_in_4_bits(folder: Path) -> Logits:
    """Write a checkpoint whose experts are microscaled 4-bit numbers; the reference computes with what they stand for."""
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
    card = json.loads((folder / "config.json").read_bytes())
    card["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(card))

    def logits(tokens: list[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return result

    return logits


ROWS: dict[str, Row] = {
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
    "gpt-oss": of_transformers("GptOssConfig", **GPT_OSS),
    "gpt-oss, 4 bits": Row(gpt_oss_in_4_bits),
    "llama4": of_transformers("Llama4TextConfig", **LLAMA4),
    "llama4, as a part of what sees": Row(llama4_that_sees),
}
