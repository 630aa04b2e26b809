"""Baichuan 1 and 2: a Llama with queries, keys and values in one tensor, ``W_pack``.

7B uses RoPE. 13B uses ALiBi, and ``model_max_length`` instead of ``max_position_embeddings``. The second generation
("Baichuan 2: open large-scale language models", 2023, section 2) divides each row of the output layer by its length
(NormHead).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.models.references.plain import PlainDecoder, RmsNorm, alibi_slopes, attention, rotated
from torch import nn


class Baichuan(PlainDecoder):
    """Either size of either generation, by its config."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = hf_config
        hidden, eps = hf_config["hidden_size"], hf_config["rms_norm_eps"]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(hf_config["vocab_size"], hidden),
                "layers": nn.ModuleList(_layer(hf_config) for _ in range(hf_config["num_hidden_layers"])),
                "norm": RmsNorm(hidden, eps),
            }
        )
        self.lm_head = nn.Linear(hidden, hf_config["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](token_ids)
        for layer in self.model["layers"]:
            x = x + self._attended(layer["self_attn"], layer["input_layernorm"](x))
            x = x + _fed_forward(layer["mlp"], layer["post_attention_layernorm"](x))
        head = self.lm_head.weight
        if "z_loss_weight" in self.hf_config:
            head = head / head.norm(dim=1, keepdim=True)
        return self.model["norm"](x) @ head.T

    def _attended(self, parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        heads = self.hf_config["num_attention_heads"]
        query, key, value = (each.reshape(len(x), heads, -1) for each in parts["W_pack"](x).chunk(3, dim=-1))
        if "max_position_embeddings" in self.hf_config:
            attended = attention(rotated(query, 10000.0), rotated(key, 10000.0), value)
        else:
            attended = attention(query, key, value, alibi_slopes(heads))
        return parts["o_proj"](attended)


def _layer(hf_config: Mapping[str, Any]) -> nn.ModuleDict:
    hidden, wide, eps = hf_config["hidden_size"], hf_config["intermediate_size"], hf_config["rms_norm_eps"]
    return nn.ModuleDict(
        {
            "self_attn": nn.ModuleDict(
                {
                    "W_pack": nn.Linear(hidden, 3 * hidden, bias=False),
                    "o_proj": nn.Linear(hidden, hidden, bias=False),
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


def _fed_forward(parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    return parts["down_proj"](nn.functional.silu(parts["gate_proj"](x)) * parts["up_proj"](x))
