"""The gated delta rule between a short convolution and a gated norm, as Qwen3-Next mixes tokens.

Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024), figure 1::

    x ─┬─ q, k, v ─ conv ─┬─ delta rule ─ norm ─ · ─ out
       ├─ alpha, beta ────┘                      │
       └─ gate ─ silu ───────────────────────────┘
"""

from __future__ import annotations

from quintet.executor.cards.spec import Activation
from quintet.executor.cards.state_specs import DeltaSpec
from quintet.executor.layers.linear import Part
from quintet.executor.layers.states import DeltaRule
from quintet.executor.models.blocks.scope import Scope
from quintet.executor.models.blocks.states import below, convolution, fading, numbers, scan_part
from quintet.executor.models.forward import ForwardPass, ValueT


class Delta:
    """A `quintet.executor.models.blocks.block.Block`."""

    def __init__(self, scope: Scope, spec: DeltaSpec) -> None:
        self._spec = spec
        need, values, heads = spec.state_need, spec.values, spec.num_heads
        self._in = scope.linear(_parts(scope, spec), scope.hidden_size)
        self._conv = convolution(scope, need, "conv1d", biased=False, silu=True)
        self._rule = DeltaRule(
            state=scan_part(scope, need),
            key_heads=spec.key_heads,
            a=fading(scope, heads),
            dt_bias=numbers(scope, "dt_bias", (heads,)),
        )
        norm = scope.norm(spec.norm, below(scope, "norm"), spec.head_dim)
        assert norm is not None
        self._norm = norm
        self._out = scope.linear([scope.part(below(scope, "out_proj"), scope.hidden_size)], values)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Block`."""
        spec, keys, values = self._spec, self._spec.keys, self._spec.values
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


def _parts(scope: Scope, spec: DeltaSpec) -> list[Part]:
    """Return queries, keys, values, gates, betas and alphas, in this order, wherever the checkpoint has them."""
    keys, values, heads, groups = spec.keys, spec.values, spec.num_heads, spec.key_heads
    if not spec.by_head:
        named = (("qkv", 2 * keys + values), ("z", values), ("b", heads), ("a", heads))
        return [scope.part(below(scope, f"in_proj_{name}"), rows) for name, rows in named]
    whole = 2 * (keys + values)
    wide = ((keys, 0), (keys, keys), (values, 2 * keys), (values, 2 * keys + values))
    parts = [
        scope.part(below(scope, "in_proj_qkvz"), rows, whole, begin // groups, groups) for rows, begin in wide
    ]
    return parts + [
        scope.part(below(scope, "in_proj_ba"), heads, 2 * heads, begin // groups, groups)
        for begin in (0, heads)
    ]
