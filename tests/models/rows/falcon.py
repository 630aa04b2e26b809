"""BLOOM, Falcon, MPT: mostly ALiBi."""

from tests.models.random_checkpoints import Row, of_transformers

_MPT = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}

ROWS: dict[str, Row] = {
    "bloom": of_transformers("BloomConfig", n_head=4, n_layer=3),
    "bloom, heads no power of two": of_transformers("BloomConfig", hidden_size=72, n_head=6, n_layer=3),
    "bloom, residuals behind norms": of_transformers(
        "BloomConfig", n_head=4, n_layer=2, apply_residual_connection_post_layernorm=True
    ),
    "falcon 7b": of_transformers("FalconConfig"),
    "falcon 40b": of_transformers("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
    "falcon 11b": of_transformers(
        "FalconConfig",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    "falcon rw": of_transformers(
        "FalconConfig",
        attention="sdpa",
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        num_kv_heads=4,
    ),
    "mpt": of_transformers("MptConfig", **_MPT),
    "mpt, heads no power of two, clipped": of_transformers(
        "MptConfig", **(_MPT | {"d_model": 72, "n_heads": 6}), attn_config={"clip_qkv": 0.7}
    ),
}
