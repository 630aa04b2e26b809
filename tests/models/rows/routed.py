"""Models of experts."""

from typing import Any

from tests.models.random_checkpoints import Row, of_transformers

SMALL: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROWS: dict[str, Row] = {
    "mixtral": of_transformers("MixtralConfig", num_local_experts=5),
    "qwen3 moe, some layers without experts": of_transformers(
        "Qwen3MoeConfig", num_experts=12, head_dim=32, decoder_sparse_step=2, norm_topk_prob=True, **SMALL
    ),
    "olmoe": of_transformers("OlmoeConfig", num_experts=8, num_experts_per_tok=3, pad_token_id=0),
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
