"""Current dense decoders that differ from Llama by one or two switches."""

from tests.models.random_checkpoints import Row, of_transformers

ROWS: dict[str, Row] = {
    "phi": of_transformers("PhiConfig"),
    "phi, normed queries": of_transformers("PhiConfig", qk_layernorm=True, num_key_value_heads=4),
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
    "olmo": of_transformers("OlmoConfig", clip_qkv=0.7),
    "olmo2": of_transformers("Olmo2Config"),
    "olmo3": of_transformers("Olmo3Config", num_hidden_layers=5, sliding_window=11),
    "olmo3, stretched": of_transformers(
        "Olmo3Config",
        num_hidden_layers=4,
        sliding_window=11,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "exaone4": of_transformers("Exaone4Config", num_hidden_layers=4, sliding_window=11),
    "exaone4, nothing slides": of_transformers(
        "Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "cohere": of_transformers("CohereConfig", logit_scale=0.25),
    "cohere, normed queries": of_transformers("CohereConfig", use_qk_norm=True, attention_bias=True),
    "cohere2": of_transformers("Cohere2Config", num_hidden_layers=5, sliding_window=11),
    "granite": of_transformers(
        "GraniteConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.4,
        logits_scaling=5.0,
    ),
    "hyperclovax": of_transformers("HyperCLOVAXConfig", residual_multiplier=0.4, logits_scaling=0.5),
    "hyperclovax, no norms behind": of_transformers(
        "HyperCLOVAXConfig", embedding_multiplier=3.0, attention_multiplier=0.3, use_post_norm=False
    ),
    "minicpm": of_transformers(
        "GraniteConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.25,
        residual_multiplier=0.6 / 3**0.5,
        logits_scaling=2.0,
        hf_config={
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": 3.0,
            "scale_depth": 0.6,
            "dim_model_base": 32,
        },
    ),
    "orion": of_transformers(
        "StableLmConfig",
        partial_rotary_factor=1.0,
        hf_config={"architectures": ["OrionForCausalLM"], "rms_norm_eps": 1e-5},
    ),
    "jais 2": of_transformers("Jais2Config"),
    "cwm": of_transformers(
        "CwmConfig",
        head_dim=16,
        num_hidden_layers=5,
        sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "glm": of_transformers("GlmConfig", head_dim=32, pad_token_id=0),
    "glm4": of_transformers("Glm4Config", head_dim=16, pad_token_id=0, attention_bias=False),
    "stablelm": of_transformers("StableLmConfig", use_qkv_bias=True),
    "stablelm, side by side": of_transformers(
        "StableLmConfig", qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "nemotron": of_transformers("NemotronConfig"),
    "smollm3": of_transformers("SmolLM3Config", num_hidden_layers=5, pad_token_id=0),
    "smollm3, window": of_transformers(
        "SmolLM3Config", num_hidden_layers=4, pad_token_id=0, use_sliding_window=True, sliding_window=11
    ),
    "ernie 4.5": of_transformers("Ernie4_5Config", head_dim=32),
    "ernie 4.5, biases": of_transformers(
        "Ernie4_5Config", head_dim=16, use_bias=True, tie_word_embeddings=False
    ),
    "ministral": of_transformers(
        "MinistralConfig",
        head_dim=16,
        sliding_window=11,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ministral 3": of_transformers(
        "Ministral3Config",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "seed-oss": of_transformers("SeedOssConfig", head_dim=32),
    "helium": of_transformers("HeliumConfig", head_dim=16),
    "hunyuan": of_transformers(
        "HunYuanDenseV1Config",
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
    ),
    "apertus": of_transformers("ApertusConfig", pad_token_id=0),
    "arcee": of_transformers("ArceeConfig", mlp_bias=True),
    "qwen2-vl, text": of_transformers(
        "Qwen2Config",
        hf_config={
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
    ),
}
