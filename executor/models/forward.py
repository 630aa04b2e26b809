"""Forward pass interface: a small set of operations on values, with which a model is written.

The backend defines a value. Eager execution (`quintet.executor.backends.torch.eager`) uses tensors and computes at
once. The recorded program (`quintet.executor.backends.cpu.program`) uses memory regions: it records operations once
and runs them with one call per step. On a GPU (`quintet.executor.backends.cuda.forward`), operations launch kernels.
So a model does not depend on batches, block tables or steps.

Operations are pure: values never change and may be read in any order. The backend decides on fusion, in-place
execution and elimination.

`norm_of_all` is a norm over values that ranks divide.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.linear import Embedding, HeadLinear, Linear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan

ValueT = TypeVar("ValueT")


class ForwardPass(Protocol[ValueT]):
    """The operations. A value is ``[rows, width]`` in the model's dtype, or logits in theirs; each row is a token of the step."""

    def embedding(self, layer: Embedding) -> ValueT:
        """Return the embedding of each of the step's tokens."""

    def add_positions(self, x: ValueT, table: torch.Tensor, offset: int) -> ValueT:
        """Return ``x`` plus row ``position + offset`` of ``table [positions, width]`` for each token."""

    def norm(self, x: ValueT, norm: Norm) -> ValueT:
        """Return ``x`` normalized."""

    def linear(self, layer: Linear, x: ValueT) -> ValueT:
        """Return ``layer(x)`` with bias and gated activation, in the result dtype of the layer's shape if set."""

    def add(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x + y``, of equal width."""

    def multiply(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x * y``, of equal width or with one ``y`` per row."""

    def scale(self, x: ValueT, factor: float) -> ValueT:
        """Return ``x * factor`` in x's dtype; the factor itself is not rounded."""

    def clip(self, x: ValueT, bound: float) -> ValueT:
        """Return ``x`` clamped to ``[-bound, bound]``."""

    def softcap(self, x: ValueT, cap: float) -> ValueT:
        """Return ``cap * tanh(x / cap)``, rounded to x's dtype after each operation."""

    def activation(self, x: ValueT, kind: Activation) -> ValueT:
        """Return the elementwise activation. Almost free directly after a linear layer without gates."""

    def xielu(self, x: ValueT, numbers: torch.Tensor) -> ValueT:
        """Return xIELU with parameters fp32 ``[4]``; see `quintet.executor.backends.cpu.ops.activation.xielu`."""

    def columns(self, x: ValueT, begin: int, width: int) -> ValueT:
        """Return columns ``[begin, begin + width)`` as a view, without cost."""

    def from_previous_stage(self, width: int) -> ValueT:
        """Return the previous pipeline stage's output for each of the step's tokens."""

    def of_all_ranks(self, x: ValueT, kept: KeptRange) -> ValueT:
        """Return all ranks' columns, concatenated; ``x`` has the columns ``kept``. Read the result once, before the next call."""

    def head_linear(self, layer: HeadLinear, x: ValueT) -> ValueT:
        """Return each head's columns of ``x`` multiplied by the head's matrix."""

    def join(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x`` and ``y`` concatenated by columns."""

    def experts(self, layer: Experts, x: ValueT, scores: ValueT) -> ValueT:
        """Return each token's weighted sum over the experts that ``scores [rows, experts]`` select, as wide as ``x``."""

    def attention(self, layer: AttentionLayer, q: ValueT, k: ValueT, v: ValueT) -> ValueT:
        """Norm and rotate queries and keys, store keys and values, then attend. Returns ``[rows, num_heads * value_width]``.

        q: ``[rows, num_heads * head_dim]``; k: ``[rows, num_kv_heads * head_dim]``; v: ``[rows, num_kv_heads *
        value_width]``. With ``layer.values_in_keys``, v is a prefix of k and need not be stored again. Column views
        of one value are free.
        """

    def causal_conv(self, layer: CausalConv, x: ValueT) -> ValueT:
        """Return each channel of ``x`` convolved over its last tokens; see `quintet.executor.backends.cpu.ops.states`.

        This operation and the scans below read the layer's state of each row and write the next one.
        """

    def selective_scan(
        self, layer: SelectiveScan, x: ValueT, dt: ValueT, b: ValueT, c: ValueT, gate: ValueT
    ) -> ValueT:
        """Return ``x`` scanned and gated; see `quintet.executor.backends.cpu.ops.states`."""

    def head_scan(
        self, layer: HeadScan, x: ValueT, dt: ValueT, b: ValueT, c: ValueT, gate: ValueT | None
    ) -> ValueT:
        """Return ``x`` scanned and, if there is a gate, gated; see `quintet.executor.backends.cpu.ops.states`."""

    def delta_rule(
        self, layer: DeltaRule, q: ValueT, k: ValueT, v: ValueT, alpha: ValueT, beta: ValueT
    ) -> ValueT:
        """Return the state's output for ``q``, updated by ``k``, ``v``; see `quintet.executor.backends.cpu.ops.states`."""


def norm_of_all(ops: ForwardPass[ValueT], x: ValueT, norm: Norm, kept: KeptRange) -> ValueT:
    """Return ``x`` normed over all ranks' columns; ``x`` has the columns ``kept``."""
    if kept.is_all:
        return ops.norm(x, norm)
    return ops.columns(ops.norm(ops.of_all_ranks(x, kept), norm), kept.begin, kept.count)
