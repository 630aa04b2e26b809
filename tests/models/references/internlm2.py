"""InternLM 2 ("InternLM2 technical report", 2024, section 3.2).

``wqkv`` holds, for each key head in turn, its queries, then the key, then the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.models.references.plain import PlainDecoder, RmsNorm, attention, rotated
from torch import nn


class InternLM2(PlainDecoder):
    """The decoder of a config; within ``max_position_embeddings``, where dynamic RoPE scaling has no effect."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = hf_config
        hidden = hf_config["hidden_size"]
        self.model = nn.ModuleDict(
            {
                "tok_embeddings": nn.Embedding(hf_config["vocab_size"], hidden),
                "layers": nn.ModuleList(_layer(hf_config) for _ in range(hf_config["num_hidden_layers"])),
                "norm": RmsNorm(hidden, hf_config["rms_norm_eps"]),
            }
        )
        self.output = nn.Linear(hidden, hf_config["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.model["tok_embeddings"](token_ids)
        for layer in self.model["layers"]:
            x = x + self._attended(layer["attention"], layer["attention_norm"](x))
            normed, mlp = layer["ffn_norm"](x), layer["feed_forward"]
            x = x + mlp["w2"](nn.functional.silu(mlp["w1"](normed)) * mlp["w3"](normed))
        return self.output(self.model["norm"](x))

    def _attended(self, parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.hf_config["num_attention_heads"], self.hf_config["num_key_value_heads"]
        each = heads // kv_heads
        packed = parts["wqkv"](x).reshape(len(x), kv_heads, each + 2, -1)
        query = packed[:, :, :each].reshape(len(x), heads, -1)
        key, value = packed[:, :, each], packed[:, :, each + 1]
        theta = self.hf_config["rope_theta"]
        return parts["wo"](attention(rotated(query, theta), rotated(key, theta), value))


def _layer(hf_config: Mapping[str, Any]) -> nn.ModuleDict:
    hidden, wide, eps, bias = (
        hf_config[key] for key in ("hidden_size", "intermediate_size", "rms_norm_eps", "bias")
    )
    heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict(
                {
                    "wqkv": nn.Linear(hidden, hidden // heads * (heads + 2 * kv_heads), bias=bias),
                    "wo": nn.Linear(hidden, hidden, bias=bias),
                }
            ),
            "feed_forward": nn.ModuleDict(
                {
                    "w1": nn.Linear(hidden, wide, bias=False),
                    "w3": nn.Linear(hidden, wide, bias=False),
                    "w2": nn.Linear(wide, hidden, bias=False),
                }
            ),
            "attention_norm": RmsNorm(hidden, eps),
            "ffn_norm": RmsNorm(hidden, eps),
        }
    )
