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
    "gemma, its first cards": of_transformers("GemmaConfig", head_dim=16, card={"hidden_act": "gelu"}),
}
