"""Decoders of today that differ from Llama by a switch or two."""

from tests.models.random_checkpoints import Row, of_transformers

ROWS: dict[str, Row] = {
    "phi3": of_transformers("Phi3Config", pad_token_id=0),
    "phi3, window": of_transformers("Phi3Config", pad_token_id=0, sliding_window=13),
    "phi4 mini": of_transformers(
        "Phi3Config",
        seed=3,
        pad_token_id=0,
        tie_word_embeddings=True,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    ),
    "olmo2": of_transformers("Olmo2Config"),
    "cwm": of_transformers(
        "CwmConfig",
        head_dim=16,
        num_hidden_layers=5,
        sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "stablelm": of_transformers("StableLmConfig", use_qkv_bias=True),
    "stablelm, side by side": of_transformers(
        "StableLmConfig", qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "ministral": of_transformers(
        "MinistralConfig",
        head_dim=16,
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ministral 3": of_transformers("Ministral3Config", head_dim=16),
    "seed-oss": of_transformers("SeedOssConfig", head_dim=32),
}
