"""Models with multi-head latent attention."""

from dataclasses import replace
from typing import Any

from tests.models.random_checkpoints import Row, of_transformers

SMALL: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}

ROWS: dict[str, Row] = {
    "deepseek v2, queries at once": of_transformers(
        "DeepseekV2Config", **(SMALL | ROUTED | {"q_lora_rank": None, "routed_scaling_factor": 2.0})
    ),
    "deepseek v2, groups": of_transformers(
        "DeepseekV2Config", **SMALL, **ROUTED, topk_method="group_limited_greedy", rope_parameters=YARN
    ),
    "deepseek v3": of_transformers("DeepseekV3Config", **SMALL, **ROUTED, rope_parameters=YARN),
    "deepseek v3, as glm 4.7 flash": replace(
        of_transformers("Glm4MoeLiteConfig", **(SMALL | ROUTED)), quantized=(0.95, 0.5)
    ),
    "deepseek v3, as youtu": of_transformers("YoutuConfig", **SMALL),
    "minicpm3": of_transformers(
        "MiniCPM3Config", **SMALL, scale_depth=1.1, scale_emb=3, dim_model_base=32, tie_word_embeddings=False
    ),
    "deepseek v3, rotated by halves, biases": replace(
        of_transformers("DeepseekV3Config", **SMALL, **ROUTED, rope_interleave=False, attention_bias=True),
        quantized=(0.8, 0.5),
    ),
}
