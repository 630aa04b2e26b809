"""A multi-token prediction layer in training (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2).

The layer and its tensor names are those of MiMo 7B: a Qwen2 model, which is a Llama with biases. A Llama with biases of zeros is
a checkpoint of that architecture, with the same outputs.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from bench.embedded.chats import Texts
from bench.embedded.draft_layer import (
    DraftLayer,
    OutputLayer,
    ScaledNorm,
    fitted_places,
    head_dim_of,
    later,
    linear_fit,
    matrix,
    norm_like,
)

LAYER = "model.mtp_layers.0"
NUM_SAMPLED = 1024
"""Less frequent tokens of a training step: a random sample stands for all of them."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")
COPIED_FILES = (*TOKENIZER_FILES, "chat_template*", "generation_config.json")
EXPLICIT = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
"""Keys of a config with other defaults than a Llama's."""
BIASED = ("q_proj", "k_proj", "v_proj")


class MtpHead(nn.Module):
    """A `bench.embedded.heads.Head` that reads the model's hidden states after its last norm.

    Embedding and output layer are the model's.
    """

    aux_layers = ()
    ids: torch.Tensor
    others: torch.Tensor

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        """ids: the most frequent tokens, ascending."""
        super().__init__()
        config = model.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = ScaledNorm(hidden, eps), ScaledNorm(hidden, eps)
        self.input_proj = matrix(2 * hidden, hidden)
        self.layer = DraftLayer(config, hidden, model.model.rotary_emb.inv_freq)
        self.final_layernorm = norm_like(model.model.norm, hidden, eps)
        is_other = torch.ones(config.vocab_size, dtype=torch.bool).index_fill(0, ids, False)
        self.register_buffer("ids", ids)
        self.register_buffer("others", is_other.nonzero()[:, 0], persistent=False)

    @torch.no_grad()
    def fit(self, model: Any, texts: Texts) -> None:
        """Set the first weights: ``input_proj`` is the linear fit of the model's last hidden state, one token later."""
        places = fitted_places(texts)
        features = self.hidden_layernorm.fit(texts.states[places - 1].float())
        tokens = self.token_layernorm.fit(model.model.embed_tokens(texts.ids[places]))
        wanted = texts.last[places].float() / model.model.norm.weight
        self.input_proj.weight.copy_(linear_fit(torch.cat((features, tokens), -1), wanted))

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, is_counted: torch.Tensor, num_drafts: int
    ) -> list[torch.Tensor]:
        """See `bench.embedded.heads.Head`."""
        tokens, features = self.token_layernorm(embedded), states
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        normed = []
        for _ in range(num_drafts):
            joined = torch.cat((self.hidden_layernorm(later(features, 1)), tokens), -1)
            x = self.input_proj(joined)
            features = self.final_layernorm(self.layer(self.layer.input_layernorm(x), x, keys, values))
            normed.append(features[is_counted])
        return normed

    def trained_output(self, model: Any) -> OutputLayer:
        """See `bench.embedded.heads.Head`. Logits of the random sample are raised as if each stood for several tokens."""
        if len(self.others) <= NUM_SAMPLED:
            return self.served_output(model)
        sample = self.others[torch.randint(len(self.others), (NUM_SAMPLED,))]
        ids, bias = torch.cat((self.ids, sample)), torch.zeros(len(self.ids) + NUM_SAMPLED)
        bias[len(self.ids) :] = math.log(len(self.others) / NUM_SAMPLED)
        return OutputLayer(ids, model.lm_head.weight[ids], bias)

    def served_output(self, model: Any) -> OutputLayer:
        """See `bench.embedded.heads.Head`."""
        return OutputLayer(torch.arange(model.config.vocab_size), model.lm_head.weight)

    def export(self, folder: Path, model: Any) -> None:
        """Write a whole checkpoint with this layer, in bfloat16. Tokenizer and chat template are the model's."""
        folder.mkdir(parents=True, exist_ok=True)
        config, source = model.config, Path(model.config.name_or_path)
        for file in (each for pattern in COPIED_FILES for each in source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
        tensors = {name: each.bfloat16().contiguous() for name, each in self._tensors(model).items()}
        save_file(tensors, folder / "model.safetensors")
        hf_config = json.loads((source / "config.json").read_bytes()) | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
            "head_dim": head_dim_of(config),
            "dtype": "bfloat16",
            **{name: getattr(config, name) for name in EXPLICIT},
        }
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")

    def _tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of the model, the layer, and biases of zeros."""
        tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        for name, weight in self.named_parameters():
            tensors[f"{LAYER}.{name.removeprefix('layer.')}"] = weight.detach()
        for name, norm in (
            ("token_layernorm", self.token_layernorm),
            ("hidden_layernorm", self.hidden_layernorm),
        ):
            tensors[f"{LAYER}.{name}.weight"] = norm.folded.detach()
        biases = {
            f"{name}.bias": torch.zeros(len(weight))
            for key, weight in tensors.items()
            if (name := key.removesuffix(".weight")).endswith(BIASED)
        }
        return tensors | biases


def check_is_plain(config: Any) -> None:
    """Raise SystemExit if the architecture of MiMo has no place for a Llama's biases."""
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise SystemExit("--kind mtp requires a Llama model without biases")
