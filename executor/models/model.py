"""What the worker asks of a model, and what a model is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.layers.rope import Rope
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.quant.method import Quantization
from quintet.executor.weights.plan import WeightPlan


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and with what a model computes."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization
    """Who makes the methods of its linear layers; the model hands it on."""


class CausalModel(Protocol):
    """A decoder over paged KV memory."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def windows(self) -> Sequence[int | None]:
        """Each layer's sliding window, None where a layer sees everything; the length is the number of layers."""

    @property
    def rope(self) -> Rope:
        """How positions rotate queries and keys, in every layer."""

    @property
    def weights(self) -> WeightPlan:
        """What a checkpoint must hold and where it goes."""

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """Return the last hidden states ``[num_tokens, hidden]``."""

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """Return ``[num_rows, vocab_size]`` of ``hidden [num_rows, hidden]``, in the model's dtype."""
