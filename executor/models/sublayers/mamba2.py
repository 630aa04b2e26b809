"""Mamba 2: one projection gives gate, channels, inputs, outputs and time steps; the middle three are convolved, then scanned.

Dao and Gu, "Transformers are SSMs" (2024), figure 6::

    x ─ in ─┬─ channels, b, c ─ conv ─┬─ scan ─ · ─ norm ─ out
            ├─ dt ────────────────────┘         │
            └─ gate ─ silu ─────────────────────┘
"""

from __future__ import annotations

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.model_config.state_specs import Mamba2Spec
from quintet.executor.models.forward import ForwardPass, ValueT, norm_of_all
from quintet.executor.models.layers.states import HeadScan
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


class Mamba2:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

    def __init__(self, scope: Scope, spec: Mamba2Spec) -> None:
        share, own = scope.share, scope.share.of_state(spec)
        self._spec = own
        heads, need = share.of(spec.num_heads), own.state_need
        channels = heads.times(spec.head_dim)
        inputs = share.of_kv_heads(spec.groups).times(spec.state_size)
        self._in = scope.linear(
            KeptRows(channels, channels, inputs, inputs, heads).parts(scope, "in_proj"),
            scope.hidden_size,
            biased=spec.projection_bias,
        )
        self._conv = convolution(
            *(scope, need, "conv1d", KeptRows(channels, inputs, inputs)),
            biased=spec.conv_bias,
            silu=True,
            factors=_conv_factors(own),
        )
        self._scan = HeadScan(
            state=scan_part(scope, need),
            groups=own.groups,
            a=decay(scope, KeptRows(heads)),
            dt_bias=parameter(scope, "dt_bias", KeptRows(heads)),
            skip=parameter(scope, "D", KeptRows(heads)),
            dt_limits=spec.dt_limits,
        )
        self._norm, self._normed = None, channels
        if spec.norm is not None:
            weight = scope.vector(scope.name(tensor_name(scope, "norm.weight")), spec.norm, channels.whole)
            if spec.groups % share.size == 0:  # whole groups: the norm needs no values of other ranks
                weight = None if weight is None else weight[channels.begin : channels.end]
                self._normed = KeptRange(0, channels.count, channels.count)
            self._norm = scope.norm_of(spec.norm, channels.whole // spec.groups, weight)
        self._out = output(scope, "out_proj", channels, scope.hidden_size, biased=spec.output_bias)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        spec, channels, group = self._spec, self._spec.channels, self._spec.groups * self._spec.state_size
        projected = ops.linear(self._in, x)
        gate = scaled(ops, ops.columns(projected, 0, channels), spec.multipliers[0])
        dt = ops.columns(projected, channels + spec.conv_channels, spec.num_heads)
        convolved = ops.causal_conv(self._conv, ops.columns(projected, channels, spec.conv_channels))
        y = ops.head_scan(
            self._scan,
            ops.columns(convolved, 0, channels),
            scaled(ops, dt, spec.multipliers[4]),
            ops.columns(convolved, channels, group),
            ops.columns(convolved, channels + group, group),
            None if spec.norm_before_gate else gate,
        )
        if self._norm is not None:
            y = norm_of_all(ops, y, self._norm, self._normed)
        if spec.norm_before_gate:
            y = ops.multiply(y, ops.activation(gate, Activation.SILU))
        return ops.linear(self._out, y)


def scaled(ops: ForwardPass[ValueT], x: ValueT, factor: float) -> ValueT:
    """Return ``x * factor``, or ``x`` itself for factor 1."""
    return x if factor == 1.0 else ops.scale(x, factor)


def _conv_factors(spec: Mamba2Spec) -> torch.Tensor | None:
    """Return the multipliers of the convolution's inputs, folded into its float32 weights; None if all are 1."""
    _, channels, inputs, outputs, _ = spec.multipliers
    if channels == inputs == outputs == 1.0:
        return None
    group = spec.groups * spec.state_size
    return torch.cat(
        [
            torch.full((width,), factor)
            for width, factor in ((spec.channels, channels), (group, inputs), (group, outputs))
        ]
    )
