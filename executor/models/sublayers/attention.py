"""Attention with one linear layer for queries, keys and values (Vaswani et al., "Attention is all you need", 2017).

With gated attention, the gates follow the values (Qiu et al., "Gated attention for large language models", 2025).
"""

from __future__ import annotations

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation, AttentionSpec, NormSpec, QkNormOver, QkvLayout
from quintet.executor.models.forward import ForwardPass, ValueT, norm_of_all
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.sublayers.scope import Scope


class Attention:
    """A `quintet.executor.models.sublayers.layer.Sublayer`."""

    def __init__(self, scope: Scope, spec: AttentionSpec, depth: int | None = None) -> None:
        """depth: width of the input; None: the hidden size."""
        assert scope.layer is not None
        heads, kv_heads = scope.share.of(spec.num_heads), scope.share.of_kv_heads(spec.num_kv_heads)
        queries, keys = heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        values, attended = kv_heads.times(spec.value_dim), heads.times(spec.value_dim)
        kinds = zip(_qkv_parts(scope, spec), (queries, keys, values, queries), strict=False)
        parts, spec = [part.keeping(kept) for part, kept in kinds], scope.share.of_attention(spec)
        self._widths = (queries.count, keys.count, values.count)
        self._qkv = scope.linear(parts, depth or scope.hidden_size, biased=spec.qkv_bias)
        self._output = scope.linear(
            [scope.part(scope.names.output, scope.hidden_size).of_inputs(attended, scope.share.own_leaves)],
            attended.count,
            biased=spec.output_bias,
        )
        self._clip, self._gated = spec.clip_qkv, spec.output_gate
        self._attended = attended
        self._norm = scope.norm(spec.attended_norm, scope.names.attended_norm, attended.whole)
        self._queries, self._keys = queries, keys
        q_norm = _head_norm(scope, spec, scope.names.q_norm, heads)
        k_norm = _head_norm(scope, spec, scope.names.k_norm, kv_heads)
        whole = spec.qk_norm_over is QkNormOver.WHOLE
        self._q_norm, self._k_norm = (q_norm, k_norm) if whole else (None, None)
        self.layer = AttentionLayer(
            index=scope.layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            scale=spec.scale,
            rope=None if spec.rope is None else scope.ropes.index(spec.rope),
            rotary_dim=0 if spec.rope is None else spec.rope.rotary_dim,
            interleaved=spec.interleaved,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            alibi_slopes=_slopes(scope, spec),
            sinks=_sinks(scope, spec, heads),
            q_norm=None if whole else q_norm,
            k_norm=None if whole else k_norm,
            norms_after_rope=spec.qk_norm is not None and spec.qk_norm_after_rope,
            temperature=spec.temperature,
            kept_kv_heads=kv_heads,
        )
        scope.attentions.append(self.layer)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        qkv = ops.linear(self._qkv, x)
        if self._clip is not None:
            qkv = ops.clip(qkv, self._clip)
        queries, keys, values = self._widths
        q, k = ops.columns(qkv, 0, queries), ops.columns(qkv, queries, keys)
        v = ops.columns(qkv, queries + keys, values)
        if self._q_norm is not None and self._k_norm is not None:
            q = norm_of_all(ops, q, self._q_norm, self._queries)
            k = norm_of_all(ops, k, self._k_norm, self._keys)
        attended = ops.attention(self.layer, q, k, v)
        if self._gated:
            gates = ops.columns(qkv, queries + keys + values, queries)
            attended = ops.multiply(attended, ops.activation(gates, Activation.SIGMOID))
        if self._norm is not None:
            attended = norm_of_all(ops, attended, self._norm, self._attended)
        return ops.linear(self._output, attended)


def _qkv_parts(scope: Scope, spec: AttentionSpec) -> list[RowRange]:
    """Return the rows of queries, keys and values, in this order, then gates, for any checkpoint layout."""
    names, kv_heads = scope.names, spec.num_kv_heads
    q, k, v = spec.num_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.value_dim
    if spec.output_gate:
        q_part, gates = (scope.part(names.q, q, 2 * q, begin, spec.num_heads) for begin in (0, spec.head_dim))
        return [q_part, scope.part(names.k, k), scope.part(names.v, v), gates]
    if spec.layout is QkvLayout.SEPARATE:
        return [scope.part(names.q, q), scope.part(names.k, k), scope.part(names.v, v)]
    if spec.layout is QkvLayout.QUARTERS:
        return [scope.part(names.qkv, q, 3 * q, part * q // 4, 4) for part in (0, 2, 1)]
    groups = kv_heads if spec.layout is QkvLayout.GROUPED else 1
    return [
        scope.part(names.qkv, rows, q + k + v, begin // groups, groups)
        for rows, begin in ((q, 0), (k, q), (v, q + k))
    ]


def _slopes(scope: Scope, spec: AttentionSpec) -> torch.Tensor | None:
    if not spec.alibi:
        return None
    return torch.tensor(spec.alibi, dtype=torch.float32, device=scope.setting.device)


def _sinks(scope: Scope, spec: AttentionSpec, heads: KeptRange) -> torch.Tensor | None:
    if not spec.sinks:
        return None
    whole = scope.weights.floats(scope.name(scope.names.sinks), heads.whole)
    return whole[heads.begin : heads.end]


def _head_norm(scope: Scope, spec: AttentionSpec, name: str, heads: KeptRange) -> Norm | None:
    """Declare the norm of queries or keys. Over all heads, its weight is complete even on a rank with some heads."""
    norm, dim = spec.qk_norm, spec.head_dim
    if norm is None or spec.qk_norm_over is QkNormOver.HEAD:
        return scope.norm(norm, name, dim)
    if spec.qk_norm_over is QkNormOver.WHOLE:
        return scope.norm(norm, name, heads.whole * dim)
    return scope.norm_of(norm, dim, _own_weights(scope, norm, name, heads, dim))


def _own_weights(scope: Scope, norm: NormSpec, name: str, heads: KeptRange, dim: int) -> torch.Tensor | None:
    """Declare a weight ``[heads * dim]`` that the checkpoint stores as one tensor, or as one per head."""
    name = scope.name(name)
    if "{head}" not in name:
        weight = scope.vector(f"{name}.weight", norm, heads.whole, dim)
        return None if weight is None else weight[heads.begin : heads.end].flatten()
    weights = torch.empty((heads.whole, dim), dtype=scope.weights.dtype, device=scope.weights.device)
    for head, place in enumerate(weights):
        scope.weights.expect(f"{name.format(head=head)}.weight", (dim,), place.copy_, scale=0.0)
    return weights[heads.begin : heads.end].flatten()
