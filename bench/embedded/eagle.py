"""An EAGLE-3 head in training (Li et al., "EAGLE-3", 2025)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from bench.embedded.chats import Texts
from bench.embedded.draft_layer import (
    DraftLayer,
    Norm,
    OutputLayer,
    fitted_places,
    head_dim_of,
    later,
    linear_fit,
    matrix,
    norm_like,
    sizes_of,
)
from quintet.executor.model_config.draft_heads import AUX_LAYERS, default_aux_layers


class EagleHead(nn.Module):
    """A `bench.embedded.heads.Head` that reads hidden states after some of the model's layers."""

    ids: torch.Tensor
    scale: torch.Tensor

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        """ids: the model's ids of the tokens that the head proposes, ascending."""
        super().__init__()
        config = model.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.aux_layers = default_aux_layers(config.num_hidden_layers)
        self.theta = float(config.rope_parameters["rope_theta"])
        width = head_dim_of(config)
        self.midlayer = DraftLayer(config, 2 * hidden, self.theta ** (-torch.arange(0, width, 2) / width))
        self.hidden_norm = Norm(hidden, eps)
        self.fc = matrix(len(self.aux_layers) * hidden, hidden)
        self.norm = norm_like(model.model.norm, hidden, eps)
        self.lm_head = matrix(hidden, len(ids))
        self.lm_head.weight.data.copy_(model.lm_head.weight[ids])
        self.register_buffer("ids", ids)
        self.register_buffer("scale", torch.ones(len(self.aux_layers) * hidden))

    @torch.no_grad()
    def fit(self, model: Any, texts: Texts) -> None:
        """Set the first weights: ``fc`` is the linear fit of the model's last hidden state, one token later.

        Channels of hidden states are divided by their sizes, since some are a thousand times larger than others.
        """
        places = fitted_places(texts)
        states = texts.states[places - 1].float()
        self.scale = sizes_of(states)
        wanted = texts.last[places].float() / model.model.norm.weight
        self.fc.weight.copy_(linear_fit(states / self.scale, wanted))

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, is_counted: torch.Tensor, num_drafts: int
    ) -> list[torch.Tensor]:
        """See `bench.embedded.heads.Head`."""
        features = self.fc(states / self.scale)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        normed = []
        for _ in range(num_drafts):
            features = later(features, 1)
            x = torch.cat((self.midlayer.input_layernorm(embedded), self.hidden_norm(features)), -1)
            features = self.midlayer(x, features, keys, values)
            normed.append(self.norm(features[is_counted]))
        return normed

    def trained_output(self, model: Any) -> OutputLayer:
        """See `bench.embedded.heads.Head`."""
        return OutputLayer(self.ids, self.lm_head.weight)

    def served_output(self, model: Any) -> OutputLayer:
        """See `bench.embedded.heads.Head`."""
        return OutputLayer(self.ids, self.lm_head.weight)

    def export(self, folder: Path, model: Any) -> None:
        """Write the head as its authors do, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        config, vocab_size = model.config, model.config.vocab_size
        tensors = {name: weight.detach().bfloat16() for name, weight in self.named_parameters()}
        tensors["midlayer.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
        tensors["fc.weight"] = (self.fc.weight.detach() / self.scale).bfloat16()
        if len(self.ids) < vocab_size:
            tensors["d2t"] = self.ids - torch.arange(len(self.ids))
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, self.ids, True)
        save_file(tensors, folder / "model.safetensors")
        kept = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "hidden_act",
        )
        hf_config: dict[str, Any] = {
            name: getattr(config, name) for name in (*kept, "rms_norm_eps", "max_position_embeddings")
        }
        hf_config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": head_dim_of(config),
            "rope_theta": self.theta,
            "dtype": "bfloat16",
            "draft_vocab_size": len(self.ids),
            AUX_LAYERS: list(self.aux_layers),
        }
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")
