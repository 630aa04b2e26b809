"""What the worker asks of a model, and what a model is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.checkpoints.quant.method import Quantization
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.share import WHOLE, Share
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and with what a model computes."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization
    """Who makes the methods of its linear layers; the model hands it on."""
    share: Share = WHOLE
    """What this process computes of it, where others compute the rest."""
    logits_dtype: torch.dtype = torch.float32
    """Number format of logits: float32, or ``dtype``."""


class CausalModel(Protocol):
    """A decoder over paged KV memory."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def attentions(self) -> Sequence[AttentionLayer]:
        """The layers that keep keys and values, in the order of their indexes."""

    @property
    def ropes(self) -> Sequence[Rope]:
        """How positions rotate queries and keys: those that `AttentionLayer.rope` counts."""

    @property
    def weights(self) -> WeightPlan:
        """What a checkpoint must hold and where it goes."""

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """Return the last hidden states ``[num_tokens, hidden]``."""

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """Return ``[num_rows, vocab_size]`` of ``hidden [num_rows, hidden]``, in `Setting.logits_dtype`."""
