"""Models of experts."""

from typing import Any

from tests.models.random_checkpoints import Row, of_transformers

SMALL: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GRANITE: dict[str, Any] = {
    "num_local_experts": 9,
    "num_experts_per_tok": 4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

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
}
