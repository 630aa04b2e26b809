"""Interface of a model for the worker, and the settings with which a model is built."""

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
    """Device, dtype, quantization and share of a model."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization
    """Creates the methods of the model's linear layers."""
    share: Share = WHOLE
    """The share of the model that this process computes."""
    logits_dtype: torch.dtype = torch.float32
    """Dtype of logits: float32, or ``dtype``."""


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
