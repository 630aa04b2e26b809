"""Shapes of models with random weights, and the bytes and FLOPs of their steps, counted from the config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.kv_spec import full_layers

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family in bf16."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int = 131072

    @property
    def layer_weights(self) -> int:
        """Number of weights in the linear layers of one decoder layer."""
        attention = 2 * self.heads + 2 * self.kv_heads
        return self.hidden * (attention * self.head_dim + 3 * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: linear layers and output layer, without the embedding."""
        return 2 * (self.layers * self.layer_weights + self.vocab_size * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def decode_bytes(self, rows: int, context: float) -> float:
        """Return the bytes that a step of ``rows`` requests with ``context`` tokens each must read."""
        return self.weight_bytes + rows * context * self.kv_bytes_per_token

    def prefill_flops(self, tokens: int) -> float:
        """Return the FLOPs of one prompt: its linear layers, causal attention, and the logits of its last token."""
        linear = 2 * self.layers * self.layer_weights * tokens + 2 * self.vocab_size * self.hidden
        pairs = tokens * (tokens + 1) / 2
        return linear + 4 * self.layers * self.heads * self.head_dim * pairs

    @property
    def hf_config(self) -> dict[str, Any]:
        """The HF config."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_len,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": self.vocab_size - 1,
            "eos_token_id": self.vocab_size - 1,
        }


LLAMA_3_8B = Shape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256)
TOY = Shape("toy", 64, 128, 2, 4, 2, 16, 2051, 4096)
"""For tests of the benchmarks without a GPU."""


def shape_for(device: str) -> Shape:
    """Return the shape that is measured on a device."""
    return LLAMA_3_8B if device == "cuda" else TOY


def engine_config(
    shape: Shape,
    folder: Path,
    device: str,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    **executor: Any,
) -> EngineConfig:
    """Return an engine configuration with random weights; ``folder`` is its run folder.

    KV memory: the free memory of a GPU, or a fixed size on a CPU.
    """
    kv = full_layers(shape.layers, shape.kv_heads, shape.head_dim, 2, BLOCK_SIZE)
    memory_bytes = 0 if device == "cuda" else 2 * max_num_seqs * max_model_len * kv.bytes_per_token
    return EngineConfig(
        run_dir=str(folder),
        model=ModelConfig(
            path=str(folder),
            tokenizer_path=str(folder),
            served_names=["bench"],
            architecture=shape.hf_config["architectures"][0],
            hf_config=json.dumps(shape.hf_config),
            dtype="bfloat16",
            vocab_size=shape.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=[],
            kv=kv,
        ),
        cache=CacheConfig(memory_bytes=memory_bytes, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        executor=ExecutorConfig(
            device="cuda" if device == "cuda" else "cpu", load_format="dummy", **executor
        ),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(),
    )
