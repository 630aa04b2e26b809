"""Interface of a model for the worker, its settings, and its construction from a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from quintet.executor.backends.platforms.platform import entry_point_path, import_string
from quintet.executor.checkpoints.quant.method import Quantization
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.lora.adapters import Adapters
from quintet.executor.model_config.draft_heads import DRAFT_HEADS
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.model_config.share import WHOLE, Share
from quintet.executor.model_config.spec import ModelSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.rope import Rope
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, dtype, quantization and share of a model."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization
    """Creates the methods of the model's linear layers."""
    share: Share = WHOLE
    """The share of the model that this process computes."""
    logits_dtype: torch.dtype = torch.float32
    """Dtype of logits: float32, or ``dtype``."""
    adapters: Adapters | None = None


class CausalModel(Protocol):
    """A decoder over paged KV memory."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def attentions(self) -> Sequence[AttentionLayer]:
        """The layers with KV memory, in index order."""

    @property
    def ropes(self) -> Sequence[Rope]:
        """Rotations of queries and keys; `AttentionLayer.rope` is an index into them."""

    @property
    def weights(self) -> WeightPlan:
        """The tensors expected in a checkpoint, with their destinations."""

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """Return the last hidden states ``[num_tokens, hidden]``."""

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """Return ``[num_rows, vocab_size]`` of ``hidden [num_rows, hidden]``, in `Setting.logits_dtype`."""


@runtime_checkable
class PooledModel(Protocol):
    """A `CausalModel` with hidden states that can be pooled."""

    def normed(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """Return hidden states after the final norm."""

    def logits_of_normed(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """Return the logits of hidden states after the final norm."""


def build_model(architecture: str, hf_config: HfConfig, setting: Setting) -> CausalModel:
    """Return the model, its weights not yet loaded. Raises `ConfigError` for an unsupported architecture.

    Packages can register models as entry points of the group ``quintet.models``, named after the architecture.
    """
    family = FAMILIES.get(architecture) or DRAFT_HEADS.get(architecture)
    if family is not None:
        builder: Callable[[ModelSpec, Setting], CausalModel] = import_string(family.builder)
        return builder(family.read(hf_config), setting)
    path = entry_point_path("quintet.models", architecture)
    if path is None:
        near = nearest(architecture)
        raise ConfigError(
            f"{hf_config.path}: unsupported architecture {architecture!r:.80}"
            f"{f'; the nearest supported one is {near}' if near else '; docs/models.md lists the supported ones'}. Install a"
            " package that registers it under 'quintet.models', or try --model-impl transformers, which runs the model in"
            " transformers"
        )
    build: Callable[[HfConfig, Setting], CausalModel] = import_string(path)
    return build(hf_config, setting)
