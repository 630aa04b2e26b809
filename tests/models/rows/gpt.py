"""GPT-2 and its descendants."""

from tests.models.random_checkpoints import Row, of_transformers

_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}

ROWS: dict[str, Row] = {
    "gpt2": of_transformers("GPT2Config", **_GPT2),
    "gpt2, shrinking scores, untied": of_transformers(
        "GPT2Config",
        **_GPT2,
        n_inner=112,
        scale_attn_by_inverse_layer_idx=True,
        activation_function="relu",
        tie_word_embeddings=False,
    ),
    "gpt_bigcode": of_transformers("GPTBigCodeConfig", **_GPT2),
    "gpt_bigcode, as many KV heads as heads": of_transformers("GPTBigCodeConfig", **_GPT2, multi_query=False),
    "starcoder2": of_transformers("Starcoder2Config", sliding_window=11),
    "starcoder2, no biases": of_transformers("Starcoder2Config", use_bias=False, tie_word_embeddings=False),
    "gpt_neo": of_transformers(
        "GPTNeoConfig", num_hidden_layers=4, attention_types=[[["global", "local"], 2]], window_size=11
    ),
    "gptj": of_transformers("GPTJConfig", **_GPT2, rotary_dim=8),
    "codegen": of_transformers("CodeGenConfig", **_GPT2, rotary_dim=8),
    "gpt_neox": of_transformers("GPTNeoXConfig", rotary_pct=0.5),
    "gpt_neox, one after the other": of_transformers(
        "GPTNeoXConfig", rotary_pct=1.0, use_parallel_residual=False, attention_bias=False
    ),
    "persimmon": of_transformers("PersimmonConfig"),
}
