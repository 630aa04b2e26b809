"""A forward pass over a device's kernels: the same calls whether they are launched at once or captured into a graph.

A `quintet.executor.models.forward.ForwardPass`. Every operation is a launch on the current stream; none waits, none reads
a value, so a step may be captured whole. What a residual connection adds is kept apart until the norm that follows it,
which adds and norms in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.cuda.attention.backend import AttentionBackend
from quintet.executor.cuda.device import Device
from quintet.executor.cuda.linear_choice import DeviceLinears
from quintet.executor.cuda.ops.activation import Gate, gated
from quintet.executor.cuda.ops.attention import AttentionPlan, paged_attention
from quintet.executor.cuda.ops.norm import add_rms_norm, rms_norm
from quintet.executor.cuda.ops.rope_kv import rope_kv
from quintet.executor.cuda.rows import StepRows
from quintet.executor.layers.linear import Embedding, Linear
from quintet.executor.models.forward import AttentionLayer
from quintet.executor.ops.linear import GatedActivation

GATES = {GatedActivation.SILU_AND_MUL: Gate.SILU, GatedActivation.GELU_TANH_AND_MUL: Gate.GELU_TANH}


@dataclass(slots=True)
class Value:
    """``sum``, and what is still to be added to it. Both ``[rows, width]``."""

    sum: torch.Tensor
    addend: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> Value:
        """Return some of the rows, int64[n]."""
        addend = None if self.addend is None else self.addend.index_select(0, rows)
        return Value(self.sum.index_select(0, rows), addend)

    @property
    def settled(self) -> torch.Tensor:
        """The value, where nothing is left to be added."""
        assert self.addend is None, "a residual is added by the norm that follows it"
        return self.sum


class DevicePass:
    """The pass of one step, or of one captured graph."""

    def __init__(
        self,
        device: Device,
        linears: DeviceLinears,
        attention: AttentionPlan,
        rows: StepRows,
        kv: Sequence[torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        backend: AttentionBackend | None = None,
    ) -> None:
        """kv: of each layer ``[2, num_blocks, num_kv_heads, block_size, head_dim]``; cos, sin: ``[num_tokens, rotary_dim]``;
        backend: whose attention computes, None for ours.
        """
        self._device = device
        self._multiply = linears
        self._attention = attention
        self._rows = rows
        self._kv = kv
        self._cos = cos
        self._sin = sin
        self._backend = backend
        self.linears: dict[Linear, None] = {}
        """The linear layers that were met, in order."""
        self.attentions: list[AttentionLayer] = []
        """The attention layers that were met."""

    def embedding(self, layer: Embedding) -> Value:
        """See `ForwardPass`."""
        return Value(layer(self._rows.token_ids))

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        """See `ForwardPass`. Settles ``x``."""
        if x.addend is None:
            return Value(rms_norm(self._device, x.sum, weight, eps))
        normed = add_rms_norm(self._device, x.addend, x.sum, weight, eps)
        x.addend = None
        return Value(normed)

    def linear(self, layer: Linear, x: Value, residual: Value | None = None) -> Value:
        """See `ForwardPass`."""
        self.linears[layer] = None
        y = self._multiply.apply(layer, x.settled)
        if layer.activation is not GatedActivation.NONE:
            y = gated(self._device, y, GATES[layer.activation])
        return Value(y) if residual is None else Value(residual.settled, y)

    def attention(self, layer: AttentionLayer, qkv: Value) -> Value:
        """See `ForwardPass`."""
        rows, kv = self._rows, self._kv[layer.index]
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        stacked = qkv.settled.view(rows.num_tokens, heads + 2 * kv_heads, layer.head_dim)
        q = rope_kv(
            self._device,
            stacked,
            heads,
            self._cos,
            self._sin,
            kv,
            rows,
            layer.q_norm,
            layer.k_norm,
            layer.norm_eps,
        )
        self.attentions.append(layer)
        if self._backend is None:
            attended = paged_attention(self._device, self._attention, q, kv, rows, layer.scale, layer.window)
        else:
            attended = self._backend.attend(q, kv, rows, layer.window)
        return Value(attended.view(rows.num_tokens, -1))
