"""Llama and what is shaped like it."""

from tests.models.random_checkpoints import Row, of_transformers

ROWS: dict[str, Row] = {
    "llama": of_transformers("LlamaConfig"),
    "llama, as many KV heads as heads": of_transformers("LlamaConfig", num_key_value_heads=4),
    "llama, biases": of_transformers("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama, one KV head, tied": of_transformers(
        "LlamaConfig", num_key_value_heads=1, tie_word_embeddings=True
    ),
    "mistral": of_transformers("MistralConfig", sliding_window=None),
    "mistral, window": of_transformers("MistralConfig", sliding_window=11),
    "qwen2": of_transformers("Qwen2Config"),
    "qwen2, window": of_transformers(
        "Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": of_transformers("Qwen3Config", head_dim=32),
    "qwen3, biases, tied": of_transformers(
        "Qwen3Config", head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}
