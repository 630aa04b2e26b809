"""GPT-2 and what grew from it."""

from tests.models.random_checkpoints import Row, of_transformers

_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}

ROWS: dict[str, Row] = {
    "starcoder2": of_transformers("Starcoder2Config", sliding_window=11),
    "starcoder2, no biases": of_transformers("Starcoder2Config", use_bias=False, tie_word_embeddings=False),
    "gpt_neox": of_transformers("GPTNeoXConfig", rotary_pct=0.5),
    "gpt_neox, one after the other": of_transformers(
        "GPTNeoXConfig", rotary_pct=1.0, use_parallel_residual=False, attention_bias=False
    ),
    "persimmon": of_transformers("PersimmonConfig"),
}
