"""Random LoRA adapters of a checkpoint in the format of PEFT, and the reference: transformers with the weights merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tests.models.random_checkpoints import Logits, batched_logits

STRENGTH = 0.5
"""Size of an adapter's change relative to a random weight: every prompt has other tokens."""


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """An adapter, for the modules with one of some last names."""

    targets: Sequence[str]
    rank: int = 4
    alpha: float = 8.0
    seed: int = 7
    layers: tuple[int, ...] | None = None
    """Layers with matrices; None: all."""
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``adapter_config.json``."""

    @property
    def scale(self) -> float:
        """Factor of the product of the matrices."""
        return self.alpha / (self.rank**0.5 if self.hf_config.get("use_rslora") else self.rank)


def write_adapter(adapter: RandomAdapter, model: Path, folder: Path, copy: Path | None = None) -> Logits:
    """Write the adapter; return the logits of the model with its weights merged. copy: folder for these weights."""
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    draw, tensors = torch.Generator().manual_seed(adapter.seed), {}
    for name, module in merged.named_modules():
        is_other_layer = adapter.layers is not None and not any(
            f".{layer}." in name for layer in adapter.layers
        )
        if name.rpartition(".")[2] not in adapter.targets or is_other_layer:
            continue
        is_transposed = isinstance(module, transformers.pytorch_utils.Conv1D)
        weight = module.weight.data.t() if is_transposed else module.weight.data
        a = torch.randn((adapter.rank, weight.shape[1]), generator=draw)
        b = torch.randn((weight.shape[0], adapter.rank), generator=draw)
        b *= STRENGTH * weight.std() / (adapter.rank**0.5 * adapter.scale)
        weight += adapter.scale * b @ a
        tensors |= {
            f"base_model.model.{name}.lora_A.weight": a.contiguous(),
            f"base_model.model.{name}.lora_B.weight": b.contiguous(),
        }
    assert tensors, f"no module of {adapter.targets}"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    hf_config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "bias": "none",
        **adapter.hf_config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(hf_config))
    if copy is not None:
        merged.save_pretrained(copy)
        (copy / "tokenizer.json").write_text("{}")
    return batched_logits(merged)
