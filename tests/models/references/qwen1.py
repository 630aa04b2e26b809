"""Qwen 1 ("Qwen technical report", 2023, section 2): GPT-2's tensor names around Llama's layer.

``c_attn`` holds queries, keys and values, with a bias; the feed-forward is ``w1(x) * silu(w2(x))``, half of
``intermediate_size`` wide. Beyond ``seq_length`` two more rules begin (section 3.1), and this decoder stops there: with
``use_dynamic_ntk`` the base of the rotation grows with the length, and with ``use_logn_attn`` queries are scaled by the logarithm
of their position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.models.references.plain import PlainDecoder, RmsNorm, attention, rotated
from torch import nn


class Qwen1(PlainDecoder):
    """By its card, for sequences up to its ``seq_length``."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        super().__init__()
        self.card = card
        hidden = card["hidden_size"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(card["vocab_size"], hidden),
                "h": nn.ModuleList(_layer(card) for _ in range(card["num_hidden_layers"])),
                "ln_f": RmsNorm(hidden, card["layer_norm_epsilon"]),
            }
        )
        self.lm_head = nn.Linear(hidden, card["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert len(token_ids) <= self.card["seq_length"]
        x = self.transformer["wte"](token_ids)
        for layer in self.transformer["h"]:
            x = x + self._attended(layer["attn"], layer["ln_1"](x))
            normed, mlp = layer["ln_2"](x), layer["mlp"]
            x = x + mlp["c_proj"](mlp["w1"](normed) * nn.functional.silu(mlp["w2"](normed)))
        return self.lm_head(self.transformer["ln_f"](x))

    def _attended(self, parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        heads, base = self.card["num_attention_heads"], self.card["rotary_emb_base"]
        query, key, value = (each.reshape(len(x), heads, -1) for each in parts["c_attn"](x).chunk(3, dim=-1))
        return parts["c_proj"](attention(rotated(query, base), rotated(key, base), value))


def _layer(card: Mapping[str, Any]) -> nn.ModuleDict:
    hidden, wide, eps = card["hidden_size"], card["intermediate_size"] // 2, card["layer_norm_epsilon"]
    width, biased = card["kv_channels"] * card["num_attention_heads"], not card["no_bias"]
    return nn.ModuleDict(
        {
            "ln_1": RmsNorm(hidden, eps),
            "attn": nn.ModuleDict(
                {
                    "c_attn": nn.Linear(hidden, 3 * width),
                    "c_proj": nn.Linear(width, hidden, bias=biased),
                }
            ),
            "ln_2": RmsNorm(hidden, eps),
            "mlp": nn.ModuleDict(
                {
                    "w1": nn.Linear(hidden, wide, bias=biased),
                    "w2": nn.Linear(hidden, wide, bias=biased),
                    "c_proj": nn.Linear(wide, hidden, bias=biased),
                }
            ),
        }
    )
