"""Random checkpoints with a multi-token prediction layer, and their reference.

The reference layer is a model of transformers with one layer, which reads embeddings: its last norm is that of the prediction
layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.random_checkpoints import SMALL, randomise
from tests.models.rows.latent import ROUTED, YARN
from tests.models.rows.latent import SMALL as LATENT
from tests.models.rows.states import QWEN_DENSE, QWEN_NEXT, QWEN_TWO
from torch.nn.functional import linear, rms_norm

HIDDEN, CLOSE = SMALL["hidden_size"], 1e-3
"""CLOSE: the least lead of a greedy draft, in deviations of the logits."""


@dataclass(frozen=True)
class Layout:
    """Names of a prediction layer, and its differences from DeepSeek's."""

    layer: str = "model.layers.3"
    token_norm: str = "model.layers.3.enorm"
    hidden_norm: str = "model.layers.3.hnorm"
    projection: str = "model.layers.3.eh_proj"
    output_norm: str | None = "model.layers.3.shared_head.norm"
    hidden_first: bool = False
    norm_offset: float = 0.0
    copies: tuple[str, ...] = ()
    """Tensors that repeat the model's embedding and output layer."""

    def of(self, index: int) -> Layout:
        """Return the names of a later layer."""
        names = {each.name: getattr(self, each.name) for each in fields(self)}
        later = {
            key: name.replace("layers.3", f"layers.{3 + index}").replace("layers.0", f"layers.{index}")
            for key, name in names.items()
            if isinstance(name, str)
        }
        return replace(self, **later)


DEEPSEEK = Layout(copies=("model.layers.3.embed_tokens", "model.layers.3.shared_head.head"))
QWEN = Layout(
    *("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    norm_offset=1.0,
)
MIMO = "model.mtp_layers.0"


@dataclass(frozen=True)
class Kind:
    """A family: its configuration class, settings, and those that make a model of the prediction layer alone."""

    config: str
    settings: dict[str, Any]
    layout: Layout = DEEPSEEK
    alone: dict[str, Any] = field(default_factory=dict)
    hf_config: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 1
    """Prediction layers."""


GLM = {**ROUTED, "moe_intermediate_size": 40, "use_qk_norm": True}
OF_MIMO = Layout(
    *(MIMO, f"{MIMO}.token_layernorm", f"{MIMO}.hidden_layernorm", f"{MIMO}.input_proj"),
    output_norm=f"{MIMO}.final_layernorm",
    hidden_first=True,
)
AS_MIMO = {"architectures": ["MiMoForCausalLM"]}
KINDS = {
    "mimo": Kind("Qwen2Config", {}, OF_MIMO, hf_config={**AS_MIMO, "num_nextn_predict_layers": 1}),
    "mimo, two layers": Kind(
        "Qwen2Config", {}, OF_MIMO, hf_config={**AS_MIMO, "num_mtp_layers": 2}, num_layers=2
    ),
    "glm4 moe": Kind("Glm4MoeConfig", GLM, alone={"first_k_dense_replace": 0}),
    "glm4 moe, three layers": Kind(
        "Glm4MoeConfig",
        GLM,
        alone={"first_k_dense_replace": 0},
        hf_config={"num_nextn_predict_layers": 3},
        num_layers=3,
    ),
    "deepseek v3": Kind(
        "DeepseekV3Config",
        {**LATENT, **ROUTED, "rope_parameters": YARN},
        alone={"first_k_dense_replace": 0},
    ),
    "glm 4.7 flash": Kind("Glm4MoeLiteConfig", {**LATENT, **ROUTED}, alone={"mlp_layer_types": ["sparse"]}),
    "ernie 4.5 moe": Kind(
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 9, "moe_k": 3, "moe_intermediate_size": 40},
        Layout(
            *("model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
            *("model.mtp_linear_proj.0", None),
        ),
        hf_config={"num_nextn_predict_layers": 1},
    ),
    "k-exaone": Kind(
        "ExaoneMoeConfig",
        {"num_experts": 12, "moe_intermediate_size": 40, "sliding_window": 11, "sliding_window_pattern": 3},
        replace(QWEN, norm_offset=0.0),
        alone={"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
        hf_config={"mtp_layer_types": ["full_attention"], "num_nextn_predict_layers": 1},
    ),
    "qwen3 next": Kind(
        "Qwen3NextConfig",
        {**QWEN_NEXT, "num_hidden_layers": 4},
        QWEN,
        alone={"layer_types": ["full_attention"]},
    ),
    "qwen 3.5": Kind(
        "Qwen3_5TextConfig", {**QWEN_DENSE, **QWEN_TWO}, QWEN, alone={"layer_types": ["full_attention"]}
    ),
}


@dataclass
class Reference:
    """A model and its prediction layers."""

    target: Any
    alone: list[Any]
    tensors: dict[str, torch.Tensor]
    layouts: list[Layout]

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return greedy drafts after ``tokens``, computed without a cache; those before the first close choice."""
        drafts, first, last = list[int](), torch.zeros(1, HIDDEN), len(self.alone) - 1
        known = self.target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        features = torch.cat((first, known[:-1]))
        for index in (min(depth, last) for depth in range(count)):
            layout = self.layouts[index]
            token = self.target.get_input_embeddings()(torch.tensor(tokens + drafts))
            pair = [self._normed(token, layout.token_norm), self._normed(features, layout.hidden_norm)]
            if layout.hidden_first:
                pair.reverse()
            x = linear(torch.cat(pair, dim=1), self.tensors[f"{layout.projection}.weight"])
            hidden = self.alone[index].model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            logits = self.target.lm_head(hidden[-1])
            greatest, second = logits.topk(2).values
            if greatest - second < CLOSE * logits.std():
                break
            drafts.append(int(logits.argmax()))
            features = torch.cat((features, hidden[-1:]) if index == last else (first, hidden))
        return drafts

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"] + self.layouts[0].norm_offset
        return rms_norm(x, (HIDDEN,), weight, self.target.config.rms_norm_eps)


def write(name: str, folder: Path) -> Reference:
    """Write a random checkpoint with prediction layers; return its reference."""
    kind = KINDS[name]
    target = _model(kind, {}, seed=1)
    layouts = [kind.layout.of(index) for index in range(kind.num_layers)]
    made = [_layer(kind, layout, target, folder, seed=2 + index) for index, layout in enumerate(layouts)]
    tensors = {key: value for _, each in made for key, value in each.items()}
    target.save_pretrained(folder)
    path, hf_config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(path) | tensors, path)
    hf_config.write_text(json.dumps(json.loads(hf_config.read_bytes()) | kind.hf_config))
    (folder / "tokenizer.json").write_text("{}")
    return Reference(target, [model for model, _ in made], tensors, layouts)


def _layer(
    kind: Kind, layout: Layout, target: Any, folder: Path, seed: int
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a random prediction layer as a model, and its tensors."""
    alone = _model(kind, {"num_hidden_layers": 1, **kind.alone}, seed)
    if layout.output_norm is None:
        alone.model.norm.weight.data.copy_(target.model.norm.weight)
    tensors = {
        f"{layout.projection}.weight": torch.randn(HIDDEN, 2 * HIDDEN) * (2 * HIDDEN) ** -0.5,
        **{
            f"{each}.weight": 1 - layout.norm_offset + 0.1 * torch.randn(HIDDEN)
            for each in (layout.token_norm, layout.hidden_norm)
        },
        **{f"{each}.weight": torch.zeros(3, 2) for each in layout.copies},
    }
    alone.save_pretrained(folder / "alone")
    for tensor, value in load_file(folder / "alone" / "model.safetensors").items():
        if tensor.startswith("model.layers.0."):
            tensors[tensor.replace("model.layers.0", layout.layer)] = value
        elif tensor == "model.norm.weight" and layout.output_norm is not None:
            tensors[f"{layout.output_norm}.weight"] = value
    return alone, tensors


def _model(kind: Kind, changes: dict[str, Any], seed: int) -> Any:
    config = getattr(transformers, kind.config)
    defaults = config()
    settings = {key: value for key, value in SMALL.items() if hasattr(defaults, key)} | kind.settings
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**(settings | changes)), attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(model)
    return model
