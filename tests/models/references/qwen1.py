"""Qwen 1 ("Qwen technical report", 2023, section 2): GPT-2's tensor names around Llama's layer.

``c_attn`` holds queries, keys and values, with a bias. The feed-forward is ``w1(x) * silu(w2(x))``, half of
``intermediate_size`` wide. Two more rules apply beyond ``seq_length`` (section 2.3). With ``use_dynamic_ntk`` the RoPE base
grows with the prompt, and is constant during decode. With ``use_logn_attn`` queries are scaled by the logarithm, to the
base of ``seq_length``, of the number of visible tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tests.models.references.plain import PlainDecoder, RmsNorm, attention, rotated
from torch import nn


class Qwen1(PlainDecoder):
    """The decoder of a config."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = hf_config
        hidden = hf_config["hidden_size"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(hf_config["vocab_size"], hidden),
                "h": nn.ModuleList(_layer(hf_config) for _ in range(hf_config["num_hidden_layers"])),
                "ln_f": RmsNorm(hidden, hf_config["layer_norm_epsilon"]),
            }
        )
        self.lm_head = nn.Linear(hidden, hf_config["vocab_size"], bias=False)

    def forward(self, token_ids: torch.Tensor, num_prompt: int | None = None) -> torch.Tensor:
        """num_prompt: number of prompt tokens among them; None: all."""
        base = self._base(len(token_ids) if num_prompt is None else num_prompt)
        x = self.transformer["wte"](token_ids)
        for layer in self.transformer["h"]:
            x = x + self._attended(layer["attn"], layer["ln_1"](x), base)
            normed, mlp = layer["ln_2"](x), layer["mlp"]
            x = x + mlp["c_proj"](mlp["w1"](normed) * nn.functional.silu(mlp["w2"](normed)))
        return self.lm_head(self.transformer["ln_f"](x))

    def _base(self, num_prompt: int) -> float:
        base, dim, times = self.hf_config["rotary_emb_base"], self.hf_config["kv_channels"], 1
        if self.hf_config["use_dynamic_ntk"]:
            while num_prompt > (times + 1) // 2 * self.hf_config["seq_length"]:
                times = 2 * times + 1
        return float(base * times ** (dim / (dim - 2)))

    def _attended(self, parts: nn.ModuleDict, x: torch.Tensor, base: float) -> torch.Tensor:
        heads, trained = self.hf_config["num_attention_heads"], self.hf_config["seq_length"]
        query, key, value = (each.reshape(len(x), heads, -1) for each in parts["c_attn"](x).chunk(3, dim=-1))
        query = rotated(query, base)
        if self.hf_config["use_logn_attn"]:
            grown = [max(1.0, math.log(seen, trained)) for seen in range(1, len(x) + 1)]
            query = query * torch.tensor(grown)[:, None, None]
        return parts["c_proj"](attention(query, rotated(key, base), value))


def _layer(hf_config: Mapping[str, Any]) -> nn.ModuleDict:
    hidden, wide, eps = (
        hf_config["hidden_size"],
        hf_config["intermediate_size"] // 2,
        hf_config["layer_norm_epsilon"],
    )
    width, biased = hf_config["kv_channels"] * hf_config["num_attention_heads"], not hf_config["no_bias"]
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
