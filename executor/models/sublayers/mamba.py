"""Mamba: a gated short convolution, then a scan; time steps, inputs and outputs are projections of the convolution.

Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023), figure 3::

    x ─ in ─┬─ conv ─┬──────────────── scan ─ · ─ out
            │        └─ dt, b, c ────────┘    │
            └─ gate ─ silu ───────────────────┘
"""

from __future__ import annotations

from quintet.executor.model_config.state_specs import MambaSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import SelectiveScan
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


class Mamba:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

    def __init__(self, scope: Scope, spec: MambaSpec) -> None:
        channels, own = scope.share.of(spec.channels), scope.share.of_state(spec)
        self._spec = own
        size, need, rows = spec.state_size, own.state_need, KeptRows(channels)
        self._in = scope.linear(
            KeptRows(channels, channels).parts(scope, "in_proj"),
            scope.hidden_size,
            biased=spec.projection_bias,
        )
        self._conv = convolution(scope, need, "conv1d", rows, biased=spec.conv_bias, silu=True)
        # Every rank has the complete selection, a projection of all channels.
        self._selection = output(scope, "x_proj", channels, spec.chosen_width)
        # The scan adds the bias of dt_proj in float32.
        self._widths = scope.linear(rows.parts(scope, "dt_proj"), spec.dt_rank)
        self._norms: list[Norm | None] = [
            scope.norm(spec.inner_norm, tensor_name(scope, f"{name}_layernorm"), width)
            for name, width in (("dt", spec.dt_rank), ("b", size), ("c", size))
        ]
        self._scan = SelectiveScan(
            state=scan_part(scope, need),
            a=decay(scope, rows, size),
            dt_bias=parameter(scope, "dt_proj.bias", rows),
            skip=parameter(scope, "D", rows),
        )
        self._out = output(scope, "out_proj", channels, scope.hidden_size, biased=spec.projection_bias)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        spec = self._spec
        projected = ops.linear(self._in, x)
        gate = ops.columns(projected, spec.channels, spec.channels)
        x = ops.causal_conv(self._conv, ops.columns(projected, 0, spec.channels))
        chosen, begin, parts = ops.linear(self._selection, x), 0, []
        for norm, width in zip(self._norms, (spec.dt_rank, spec.state_size, spec.state_size), strict=True):
            part = ops.columns(chosen, begin, width)
            parts.append(part if norm is None else ops.norm(part, norm))
            begin += width
        dt, b, c = parts
        return ops.linear(
            self._out, ops.selective_scan(self._scan, x, ops.linear(self._widths, dt), b, c, gate)
        )
