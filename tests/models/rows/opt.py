"""OPT."""

from tests.models.random_checkpoints import Row, of_transformers

_OPT = {"ffn_dim": 112}

ROWS: dict[str, Row] = {
    "opt": of_transformers("OPTConfig", **_OPT),
    "opt 350m": of_transformers("OPTConfig", **_OPT, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt, galactica": of_transformers(
        "OPTConfig",
        **_OPT,
        enable_bias=False,
        activation_function="gelu",
        layer_norm_elementwise_affine=False,
    ),
    "xglm": of_transformers("XGLMConfig", d_model=64, ffn_dim=112, num_layers=3, attention_heads=4),
    "biogpt": of_transformers("BioGptConfig"),
}
