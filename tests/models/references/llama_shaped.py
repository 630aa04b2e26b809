"""InternLM 1 and Aquila: Llama's shape and tensor names.

InternLM ("InternLM: a multilingual language model with progressively enhanced capabilities", 2023) has biases on all four
projections of attention if its config sets ``bias``. Aquila (BAAI, 2023) has none, and fewer key and value heads in its
largest model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.models.references.plain import PlainDecoder, RmsNorm, attention, rotated
from torch import nn


class LlamaShaped(PlainDecoder):
    """Either family, by its config."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = hf_config
        hidden = hf_config["hidden_size"]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(hf_config["vocab_size"], hidden),
                "layers": nn.ModuleList(self._layer() for _ in range(hf_config["num_hidden_layers"])),
                "norm": RmsNorm(hidden, hf_config["rms_norm_eps"]),
            }
        )
        self.lm_head = nn.Linear(hidden, hf_config["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](token_ids)
        for layer in self.model["layers"]:
            x = x + self._attended(layer["self_attn"], layer["input_layernorm"](x))
            normed, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            x = x + mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return self.lm_head(self.model["norm"](x))

    def _attended(self, parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        heads = self.hf_config["num_attention_heads"]
        kv_heads = self.hf_config.get("num_key_value_heads", heads)
        query = rotated(parts["q_proj"](x).reshape(len(x), heads, -1), 10000.0)
        key = rotated(parts["k_proj"](x).reshape(len(x), kv_heads, -1), 10000.0)
        value = parts["v_proj"](x).reshape(len(x), kv_heads, -1)
        return parts["o_proj"](attention(query, key, value))

    def _layer(self) -> nn.ModuleDict:
        hf_config = self.hf_config
        hidden, wide, eps = (
            hf_config["hidden_size"],
            hf_config["intermediate_size"],
            hf_config["rms_norm_eps"],
        )
        heads, bias = hf_config["num_attention_heads"], hf_config.get("bias", False)
        kv_width = hidden // heads * hf_config.get("num_key_value_heads", heads)
        return nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(hidden, hidden, bias=bias),
                        "k_proj": nn.Linear(hidden, kv_width, bias=bias),
                        "v_proj": nn.Linear(hidden, kv_width, bias=bias),
                        "o_proj": nn.Linear(hidden, hidden, bias=bias),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(hidden, wide, bias=False),
                        "up_proj": nn.Linear(hidden, wide, bias=False),
                        "down_proj": nn.Linear(wide, hidden, bias=False),
                    }
                ),
                "input_layernorm": RmsNorm(hidden, eps),
                "post_attention_layernorm": RmsNorm(hidden, eps),
            }
        )
