"""A forward pass as a model writes it: a handful of operations on values, top to bottom.

What a value is, is the pass's affair: a tensor, where operations compute at once
(`quintet.executor.backends.torch.eager`), or a place in memory, where they are recorded once and run later with one
call per step (`quintet.executor.backends.cpu.program`). So a model knows neither batches nor block tables nor the
step it is in.

Operations are pure: no value ever changes, any value may be read again, in any order. What is computed in place, in one
kernel, or not at all, is the pass's affair as well.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.head_linear import HeadLinear
from quintet.executor.models.layers.linear import Embedding, Linear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan

ValueT = TypeVar("ValueT")


class ForwardPass(Protocol[ValueT]):
    """The operations. A value is ``[rows, width]`` in the model's dtype, or logits in theirs; a row is a token of the step."""

    def embedding(self, layer: Embedding) -> ValueT:
        """Return the embedding of each of the step's tokens."""

    def add_positions(self, x: ValueT, table: torch.Tensor, offset: int) -> ValueT:
        """Return ``x`` plus the row ``position + offset`` of ``table [positions, width]`` of each token: learned positions."""

    def norm(self, x: ValueT, norm: Norm) -> ValueT:
        """Return ``x`` normed."""

    def linear(self, layer: Linear, x: ValueT) -> ValueT:
        """Return ``layer(x)``, its bias and its gated activation included; in the dtype that its shape names, if it names one."""

    def add(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x + y``, of one width."""

    def multiply(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x * y``, of one width; or ``y`` is one number a row."""

    def scale(self, x: ValueT, factor: float) -> ValueT:
        """Return ``x * factor`` in x's dtype; the factor is not rounded to it."""

    def clip(self, x: ValueT, bound: float) -> ValueT:
        """Return ``x``, at least ``-bound`` and at most ``bound``."""

    def softcap(self, x: ValueT, cap: float) -> ValueT:
        """Return ``cap * tanh(x / cap)``, rounded to x's dtype after each of the three."""

    def activation(self, x: ValueT, kind: Activation) -> ValueT:
        """Return the activation of every number. Behind a linear layer without gates it costs next to nothing."""

    def xielu(self, x: ValueT, numbers: torch.Tensor) -> ValueT:
        """Return the activation whose shape is learned, fp32 ``[4]``; see
        `quintet.executor.backends.cpu.ops.activation.xielu`.
        """

    def columns(self, x: ValueT, begin: int, width: int) -> ValueT:
        """Return numbers ``[begin, begin + width)`` of each row: a view, that costs nothing."""

    def of_stage_before(self, width: int) -> ValueT:
        """Return what the stage before this process's has computed of each of the step's tokens."""

    def of_all_ranks(self, x: ValueT, kept: KeptRange) -> ValueT:
        """Return what all ranks have, side by side, where ``x`` is this one's: columns ``kept`` of it. Read once, and soon."""

    def head_linear(self, layer: HeadLinear, x: ValueT) -> ValueT:
        """Return each head's columns of ``x`` through a matrix of its own."""

    def join(self, x: ValueT, y: ValueT) -> ValueT:
        """Return ``x`` and ``y`` side by side."""

    def experts(self, layer: Experts, x: ValueT, scores: ValueT) -> ValueT:
        """Return each token's sum over the experts that its scores ``[rows, experts]`` choose: as wide as ``x``."""

    def attention(self, layer: AttentionLayer, q: ValueT, k: ValueT, v: ValueT) -> ValueT:
        """Norm and rotate queries and keys, store keys and values, then attend. Returns ``[rows, num_heads * value_width]``.

        q: ``[rows, num_heads * head_dim]``; k: ``[rows, num_kv_heads * head_dim]``; v: ``[rows, num_kv_heads * value_width]``,
        where ``layer.values_in_keys`` what ``k`` begins with: a pass need not store it again.
        Columns of one value cost nothing.
        """

    def causal_conv(self, layer: CausalConv, x: ValueT) -> ValueT:
        """Return each channel of ``x`` convolved over its last tokens; see `quintet.executor.backends.cpu.ops.causal_conv`.

        This operation and the following ones go on from the state of each row's layer, and leave another.
        """

    def selective_scan(
        self, layer: SelectiveScan, x: ValueT, dt: ValueT, b: ValueT, c: ValueT, gate: ValueT
    ) -> ValueT:
        """Return ``x`` scanned and gated; see `quintet.executor.backends.cpu.ops.selective_scan`."""

    def head_scan(
        self, layer: HeadScan, x: ValueT, dt: ValueT, b: ValueT, c: ValueT, gate: ValueT | None
    ) -> ValueT:
        """Return ``x`` scanned and, if there is a gate, gated; see `quintet.executor.backends.cpu.ops.head_scan`."""

    def delta_rule(
        self, layer: DeltaRule, q: ValueT, k: ValueT, v: ValueT, alpha: ValueT, beta: ValueT
    ) -> ValueT:
        """Return what the state says of ``q``, corrected by ``k`` and ``v``; see
        `quintet.executor.backends.cpu.ops.delta_rule`.
        """
