"""Gemma 1, 2 and 3."""

from tests.models.random_checkpoints import SMALL, Row, of_transformers

_WIDE = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 11}
_TEXT = SMALL | _WIDE | {"model_type": "gemma3_text", "vocab_size": 300}
_EYES = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ROWS: dict[str, Row] = {
    "gemma": of_transformers("GemmaConfig", head_dim=32),
    "gemma, its first configs": of_transformers("GemmaConfig", head_dim=16, hf_config={"hidden_act": "gelu"}),
    "gemma2": of_transformers(
        "Gemma2Config", **_WIDE, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma2, no caps": of_transformers(
        "Gemma2Config", **_WIDE, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "vaultgemma": of_transformers("VaultGemmaConfig", **_WIDE, attn_logit_softcapping=2.0),
    "gemma3": of_transformers("Gemma3TextConfig", **_WIDE, num_hidden_layers=7),
    "gemma3, its first configs": of_transformers(
        "Gemma3TextConfig",
        **_WIDE,
        num_hidden_layers=4,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        },
        layer_types=["sliding_attention", "full_attention"] * 2,
        hf_config={
            "rope_parameters": None,
            "rope_theta": 50000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 3000.0,
            "layer_types": None,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3, with eyes": of_transformers("Gemma3Config", text_config=_TEXT, vision_config=_EYES),
}
