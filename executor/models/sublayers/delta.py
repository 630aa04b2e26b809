"""The gated delta rule with a short convolution before it and a gated norm after it (Qwen3-Next).

Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024), figure 1::

    x ─┬─ q, k, v ─ conv ─┬─ delta rule ─ norm ─ · ─ out
       ├─ alpha, beta ────┘                      │
       └─ gate ─ silu ───────────────────────────┘
"""

from __future__ import annotations

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.model_config.state_specs import DeltaSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.linear import RowRange
from quintet.executor.models.layers.states import DeltaRule
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.models.sublayers.states import (
    KeptRows,
    convolution,
    decay,
    output,
    parameter,
    scan_part,
    tensor_name,
)


class Delta:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

    def __init__(self, scope: Scope, spec: DeltaSpec) -> None:
        share, own = scope.share, scope.share.of_state(spec)
        self._spec = own
        heads, key_heads, need = share.of(spec.num_heads), share.of_kv_heads(spec.key_heads), own.state_need
        keys, values = key_heads.times(spec.key_dim), heads.times(spec.head_dim)
        self._in = scope.linear(_parts(scope, spec, keys, values, heads), scope.hidden_size)
        self._conv = convolution(scope, need, "conv1d", KeptRows(keys, keys, values), biased=False, silu=True)
        self._rule = DeltaRule(
            state=scan_part(scope, need),
            key_heads=own.key_heads,
            a=decay(scope, KeptRows(heads)),
            dt_bias=parameter(scope, "dt_bias", KeptRows(heads)),
        )
        norm = scope.norm(spec.norm, tensor_name(scope, "norm"), spec.head_dim)
        assert norm is not None
        self._norm = norm
        self._out = output(scope, "out_proj", values, scope.hidden_size)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        spec, keys, values = self._spec, self._spec.keys, self._spec.channels
        projected = ops.linear(self._in, x)
        convolved = ops.causal_conv(self._conv, ops.columns(projected, 0, 2 * keys + values))
        gate = ops.columns(projected, 2 * keys + values, values)
        beta = ops.columns(projected, 2 * (keys + values), spec.num_heads)
        alpha = ops.columns(projected, 2 * (keys + values) + spec.num_heads, spec.num_heads)
        y = ops.delta_rule(
            self._rule,
            ops.columns(convolved, 0, keys),
            ops.columns(convolved, keys, keys),
            ops.columns(convolved, 2 * keys, values),
            alpha,
            beta,
        )
        y = ops.multiply(ops.norm(y, self._norm), ops.activation(gate, Activation.SILU))
        return ops.linear(self._out, y)


def _parts(
    scope: Scope, spec: DeltaSpec, keys: KeptRange, values: KeptRange, heads: KeptRange
) -> list[RowRange]:
    """Return the kept rows of queries, keys, values, gates, betas and alphas, in this order, for any layout."""
    if not spec.by_head:
        named = {"qkv": (keys, keys, values), "z": (values,), "b": (heads,), "a": (heads,)}
        return [
            part for name, kinds in named.items() for part in KeptRows(*kinds).parts(scope, f"in_proj_{name}")
        ]
    groups, whole = spec.key_heads, 2 * (keys.whole + values.whole)
    wide = ((keys, 0), (keys, keys.whole), (values, 2 * keys.whole), (values, 2 * keys.whole + values.whole))
    parts = [
        scope.part(tensor_name(scope, "in_proj_qkvz"), kept.whole, whole, begin // groups, groups).keeping(
            kept
        )
        for kept, begin in wide
    ]
    return parts + [
        scope.part(
            tensor_name(scope, "in_proj_ba"), heads.whole, 2 * heads.whole, begin // groups, groups
        ).keeping(heads)
        for begin in (0, heads.whole)
    ]
