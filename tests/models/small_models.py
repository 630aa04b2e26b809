"""Small configurations of Llama and similar families, and prompts: for tests that do not depend on the family."""

from __future__ import annotations

import random
from collections.abc import Callable

import transformers

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama-mha": lambda: transformers.LlamaConfig(**SMALL),
    "llama-gqa-biases": lambda: transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "llama-mqa-tied": lambda: transformers.LlamaConfig(
        **SMALL, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "llama-head-dim": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=11),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, num_key_value_heads=2),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32),
    "qwen3-biases-tied": lambda: transformers.Qwen3Config(
        **SMALL, num_key_value_heads=2, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}

LENGTHS = (1, 2, 3, 5, 8, 13, 29, 50)


def prompts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(SMALL["vocab_size"]) for _ in range(length)] for length in lengths]
