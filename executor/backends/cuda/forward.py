"""Forward pass over a device's kernels, launched eagerly or captured into a graph.

Implements `quintet.executor.models.forward.ForwardPass`. Every operation launches on the current stream. None waits
or reads a value on the host, so a whole step can be captured. An addition is deferred until its result is read: a
norm fuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from quintet.executor.backends.cpu.ops.activation import activate, xielu
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.rope_kv_write import rope
from quintet.executor.backends.cuda.attention.backend import AttentionBackend
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.experts import GATES, experts
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.backends.cuda.ops.activation import gated
from quintet.executor.backends.cuda.ops.attention import paged_attention
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlans
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES
from quintet.executor.backends.cuda.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from quintet.executor.backends.cuda.ops.rope_kv import HeadTransform, rope_kv
from quintet.executor.backends.cuda.ops.states import causal_conv, delta_rule, head_scan, selective_scan
from quintet.executor.backends.cuda.ranks.communicator import DeviceCommunicator
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.embeds import StepEmbeds
from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation, NormKind
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.linear import Embedding, HeadLinear, Linear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan, StatePart


@dataclass(slots=True)
class Value:
    """A sum with a deferred addend, both ``[rows, width]``. The tensors are never written to.

    The first read performs the addition; the value then holds the new tensor.
    """

    sum: torch.Tensor
    addend: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> Value:
        """Return a selection of the rows; rows: int64[n]."""
        addend = None if self.addend is None else self.addend.index_select(0, rows)
        return Value(self.sum.index_select(0, rows), addend)

    @property
    def materialized(self) -> torch.Tensor:
        """The value as one tensor, with the addition performed; its rows may be strided."""
        if self.addend is not None:
            self.sum, self.addend = self.sum + self.addend, None
        return self.sum


class DevicePass:
    """`ForwardPass` of one step, or of one captured graph."""

    def __init__(
        self,
        device: Device,
        linears: DeviceLinears,
        attention: AttentionPlans,
        rows: StepRows,
        kv: KvMemory,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        backend: AttentionBackend | None = None,
        embeds: StepEmbeds | None = None,
        communicator: DeviceCommunicator | None = None,
        receive: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Prepare the pass.

        - rotations: cosines and sines ``[num_tokens, rotary_dim]`` per rope of the model.
        - backend: attention backend of this step; None: our kernels.
        - embeds: input embeddings of tokens without ids.
        - communicator: of tensor-parallel ranks.
        - receive: returns the hidden states of this width that a draft head reads, ``[max_tokens, width]``.
        """
        self._device = device
        self._multiply = linears
        self._attention = attention
        self._rows = rows
        self._rows_of = [rows.of_group(group) for group in range(len(kv.spec.groups))]
        self._kv = kv
        self._rotations = rotations
        self._backend = backend
        self._embeds = embeds
        self._communicator, self._receive = communicator, receive
        self.linears: dict[Linear, None] = {}
        """Linear layers of the pass, in order."""
        self.attentions: list[AttentionLayer] = []
        """Attention layers of the pass."""
        self.widest = 0
        """Largest width of a value, without logits."""

    def embedding(self, layer: Embedding) -> Value:
        embedded = layer(self._rows.token_ids)
        if self._embeds is not None:
            self._embeds.put(embedded)
        return Value(embedded)

    def add_positions(self, x: Value, table: torch.Tensor, offset: int) -> Value:
        """See `ForwardPass`. Padding reads the first row."""
        places = self._rows.positions.clamp(min=0) + offset
        return Value(x.materialized + table.index_select(0, places))

    def norm(self, x: Value, norm: Norm) -> Value:
        """See `ForwardPass`. Fuses the deferred addition of ``x``."""
        groups = norm.groups(x.sum.shape[1])
        if norm.is_per_group:
            return Value(self._normed_per_group(x.materialized, norm))
        if groups > 1:
            flat = in_packs(x.materialized).reshape(-1, norm.width)
            return Value(self._normed(flat, norm).view(-1, groups * norm.width))
        if x.addend is None:
            return Value(self._normed(in_packs(x.sum), norm))
        y, residual = in_packs(x.addend), in_packs(x.sum)
        if norm.kind is NormKind.RMS:
            total, normed = add_rms_norm(
                *(self._device, y, residual, norm.weight, norm.eps),
                offset=norm.offset,
                rounds_once=norm.rounds_once,
            )
        else:
            total, normed = add_layer_norm(self._device, y, residual, norm.weight, norm.bias, norm.eps)
        x.sum, x.addend = total, None
        return Value(normed)

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.kind is NormKind.RMS:
            return rms_norm(
                self._device, x, norm.weight, norm.eps, offset=norm.offset, rounds_once=norm.rounds_once
            )
        return layer_norm(self._device, x, norm.weight, norm.bias, norm.eps)

    def _normed_per_group(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise each group in fp32. Torch applies the weights and rounds as `Norm` does."""
        plain = replace(norm, weight=None, bias=None, offset=0.0)
        wide = self._normed(in_packs(x.float()).reshape(-1, norm.width), plain).view(x.shape)
        weight, bias = norm.weight, norm.bias
        rounds_first = norm.kind is NormKind.RMS and norm.offset == 0.0 and not norm.rounds_once
        if weight is not None and rounds_first:
            return wide.to(x.dtype) * weight
        wide = wide if weight is None else wide * (weight.float() + norm.offset)
        wide = wide if bias is None else wide + bias.float()
        return wide.to(x.dtype)

    def linear(self, layer: Linear, x: Value) -> Value:
        self.linears[layer] = None
        if not layer.shape.is_output_layer:
            self._note_width(layer.columns)
        if layer.shape.is_partial:
            return self._linear_of_ranks(layer, x)
        y = self._multiply.apply(layer, in_packs(x.materialized))
        if layer.activation is GatedActivation.NONE:
            return Value(y)
        gate = GATES.get(layer.activation)
        if gate is not None:
            return Value(gated(self._device, y, gate))
        gates, ups = y.chunk(2, dim=-1)
        return Value(activate(gates, layer.activation.kind) * ups)

    def _linear_of_ranks(self, layer: Linear, x: Value) -> Value:
        """Compute a row-parallel layer: each rank's result is rounded to the dtype, summed, and the bias is added."""
        communicator, table = self._communicator, layer.method.table
        assert communicator is not None and table is not None and not layer.activation, layer.shape
        return Value(
            communicator.add(self._multiply.multiply(in_packs(x.materialized), table), layer.method.bias)
        )

    def add(self, x: Value, y: Value) -> Value:
        """See `ForwardPass`. Deferred, so that a norm that follows can fuse it."""
        return Value(x.materialized, y.materialized)

    def multiply(self, x: Value, y: Value) -> Value:
        return Value(x.materialized * y.materialized)

    def scale(self, x: Value, factor: float) -> Value:
        # x keeps its deferred addition: a norm that fuses it has other bits.
        total = x.sum if x.addend is None else x.sum + x.addend
        return Value(total * factor)

    def clip(self, x: Value, bound: float) -> Value:
        return Value(x.materialized.clamp(-bound, bound))

    def from_previous_stage(self, width: int) -> Value:
        """See `ForwardPass`. Only draft heads have such an input: there are no pipeline stages."""
        assert self._receive is not None, f"input of width {width}"
        return Value(self._receive(width)[: self._rows.num_tokens])

    def of_all_ranks(self, x: Value, kept: KeptRange) -> Value:
        assert self._communicator is not None, kept
        self._note_width(kept.whole)
        return Value(self._communicator.all_gather_columns(x.materialized, kept))

    def softcap(self, x: Value, cap: float) -> Value:
        return Value(torch.tanh(x.materialized / cap) * cap)

    def activation(self, x: Value, kind: Activation) -> Value:
        return Value(activate(x.materialized, kind))

    def xielu(self, x: Value, numbers: torch.Tensor) -> Value:
        """See `ForwardPass`. Computed by torch."""
        return Value(xielu(x.materialized, numbers))

    def columns(self, x: Value, begin: int, width: int) -> Value:
        return Value(x.materialized.narrow(1, begin, width))

    def head_linear(self, layer: HeadLinear, x: Value) -> Value:
        self._note_width(layer.width)
        return Value(self._multiply.head_linear(layer, x.materialized))

    def join(self, x: Value, y: Value) -> Value:
        return Value(torch.cat((x.materialized, y.materialized), dim=1))

    def experts(self, layer: Experts, x: Value, scores: Value) -> Value:
        """See `ForwardPass`. Each chosen expert of a token is a row."""
        self._note_width(layer.routing.chosen * layer.widest)
        y = experts(self._device, layer, x.materialized, scores.materialized)
        if not layer.is_partial:
            return Value(y)
        assert self._communicator is not None and layer.kept.is_all, (
            "expert parallelism is not supported: ranks divide the columns of every expert"
        )
        return Value(self._communicator.add(y))

    def attention(self, layer: AttentionLayer, q: Value, k: Value, v: Value) -> Value:
        group, kv = self._kv.of_layer(layer)
        rows, fused_norms = self._rows_of[group], layer.norms_with_rotation
        cos, sin = (None, None) if layer.rope is None else self._rotations[layer.rope]
        if layer.norms_after_rope:
            q, k = (self._norm_after_rope(layer, x, cos, sin, x is k) for x in (q, k))
            cos = sin = fused_norms = None
        elif fused_norms is None:
            q = q if layer.q_norm is None else self.norm(q, layer.q_norm)
            k = k if layer.k_norm is None else self.norm(k, layer.k_norm)
        weights = (None, None) if fused_norms is None else (fused_norms[0].weight, fused_norms[1].weight)
        key_scale, value_scale = layer.kv_scales.of_layer
        transform = HeadTransform(
            *weights,
            0.0 if fused_norms is None else fused_norms[0].eps,
            0.0 if fused_norms is None else fused_norms[0].offset,
            layer.rotary_first,
            layer.interleaved,
            layer.temperature,
            (key_scale, value_scale),
        )
        queries, keys = (in_packs(x.materialized).unflatten(1, (-1, layer.head_dim)) for x in (q, k))
        values = in_packs(v.materialized).unflatten(1, (-1, layer.value_width))
        queries = rope_kv(self._device, queries, keys, values, cos, sin, kv, rows, transform)
        self.attentions.append(layer)
        if self._backend is not None:
            attended = self._backend.attend(queries, kv, rows, layer.window)
        else:
            attended = paged_attention(
                self._device,
                self._attention.of(layer),
                queries,
                kv,
                rows,
                layer.scale * key_scale,
                layer.window,
                layer.softcap or 0.0,
                layer.alibi_slopes,
                chunk=layer.chunk,
                sinks=layer.sinks,
                value_scale=value_scale,
            )
        return Value(attended.view(rows.num_tokens, -1))

    def _norm_after_rope(
        self,
        layer: AttentionLayer,
        x: Value,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        of_keys: bool,
    ) -> Value:
        """Rotate the heads with torch, then normalise them."""
        norm = layer.k_norm if of_keys else layer.q_norm
        heads = x.materialized.unflatten(1, (-1, layer.head_dim))
        if cos is not None and sin is not None:
            cos, sin = cos.view(len(heads), 1, -1), sin.view(len(heads), 1, -1)
            heads = rope(heads, cos, sin, layer.rotary_first, layer.interleaved)
        assert norm is not None, "norms after RoPE apply to both q and k"
        return self.norm(Value(heads.flatten(1)), norm)

    def causal_conv(self, layer: CausalConv, x: Value) -> Value:
        values = x.materialized
        rows, states = self._states(layer.state, values.dtype)
        return Value(causal_conv(self._device, rows, states, values, layer.weight, layer.bias, layer.silu))

    def selective_scan(
        self, layer: SelectiveScan, x: Value, dt: Value, b: Value, c: Value, gate: Value
    ) -> Value:
        rows, states = self._states(layer.state)
        values = (x.materialized, dt.materialized, b.materialized, c.materialized, gate.materialized)
        return Value(selective_scan(self._device, rows, states, *values, layer.a, layer.dt_bias, layer.skip))

    def head_scan(
        self, layer: HeadScan, x: Value, dt: Value, b: Value, c: Value, gate: Value | None
    ) -> Value:
        rows, states = self._states(layer.state)
        values = (
            x.materialized,
            dt.materialized,
            b.materialized,
            c.materialized,
            None if gate is None else gate.materialized,
        )
        parameters = (layer.a, layer.dt_bias, layer.skip, layer.dt_limits)
        return Value(head_scan(self._device, rows, states, *values, *parameters))

    def delta_rule(self, layer: DeltaRule, q: Value, k: Value, v: Value, alpha: Value, beta: Value) -> Value:
        rows, states = self._states(layer.state)
        values = (q.materialized, k.materialized, v.materialized, alpha.materialized, beta.materialized)
        return Value(delta_rule(self._device, rows, states, *values, layer.a, layer.dt_bias))

    def _states(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StepRows, torch.Tensor]:
        """Return the step's rows in a layer's state group, and the states ``[num_blocks, ...]``."""
        group, states = self._kv.of_state(part, dtype)
        return self._rows_of[group], states

    def _note_width(self, width: int) -> None:
        self.widest = max(self.widest, width)


def in_packs(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if its rows are not aligned to 16 bytes, the width of a kernel's vector load."""
    is_unaligned = x.shape[0] > 1 and x.stride(0) * x.element_size() % PACK_BYTES and not x.is_contiguous()
    if x.data_ptr() % PACK_BYTES or is_unaligned:
        return x.clone(memory_format=torch.contiguous_format)
    return x
