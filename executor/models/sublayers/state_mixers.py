"""Mixers with a state of fixed size, each a `quintet.executor.models.sublayers.layer.Sublayer`, and their common parts.

The common parts: divided rows, float32 parameters, the short convolution before the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.model_config.state_specs import (
    DeltaSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateNeed,
)
from quintet.executor.models.forward import ForwardPass, ValueT, norm_of_all
from quintet.executor.models.layers.linear import Linear, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan, StatePart
from quintet.executor.models.sublayers.scope import Scope


def tensor_name(scope: Scope, name: str) -> str:
    """Return the name of a mixer's tensor within its layer."""
    return f"{scope.names.state_mixer}.{name}"


class KeptRows:
    """Consecutive kinds of rows in a tensor, and the range of each kind that this rank keeps."""

    def __init__(self, *kinds: KeptRange) -> None:
        self._kinds = kinds
        self._begins = list(accumulate((kept.whole for kept in kinds), initial=0))
        self._is_all = all(kept.is_all for kept in kinds)

    @property
    def whole(self) -> int:
        """Number of rows of the tensor."""
        return self._begins[-1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the kept rows of a complete tensor."""
        if self._is_all:
            return tensor
        kinds = zip(self._begins, self._kinds, strict=False)
        return torch.cat([tensor[begin + kept.begin : begin + kept.end] for begin, kept in kinds])

    def parts(self, scope: Scope, name: str) -> list[RowRange]:
        """Return the kept rows as parts of one of the mixer's linear layers."""
        name = tensor_name(scope, name)
        if self._is_all:
            return [scope.part(name, self.whole)]
        kinds = zip(self._begins, self._kinds, strict=False)
        return [scope.part(name, kept.whole, self.whole, begin).keeping(kept) for begin, kept in kinds]


def parameter(
    scope: Scope,
    name: str,
    rows: KeptRows,
    *rest: int,
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """Declare a checkpoint parameter ``[rows, *rest]``; return ``take`` of its kept rows, filled on loading.

    The result is float32.
    """
    shape = (rows.whole, *rest)
    whole = torch.empty(take(rows.take(torch.zeros(shape))).shape, device=scope.weights.device)

    def fill(tensor: torch.Tensor) -> None:
        whole.copy_(take(rows.take(tensor).float()))

    scope.weights.expect(scope.name(tensor_name(scope, name)), shape, fill, num_bytes=4 * whole.numel())
    return whole


def decay(scope: Scope, rows: KeptRows, *rest: int) -> torch.Tensor:
    """Declare the decay parameter ``A_log``; return ``-exp(A_log)``, transposed if it is a matrix."""
    return parameter(scope, "A_log", rows, *rest, take=lambda tensor: -torch.exp(tensor).t())


def output(scope: Scope, name: str, kept: KeptRange, rows: int, *, biased: bool = False) -> Linear:
    """Declare a linear layer with inputs divided over ranks; ``kept`` is this rank's range."""
    part = scope.part(tensor_name(scope, name), rows).of_inputs(kept, scope.share.own_leaves)
    return scope.linear([part], kept.count, biased=biased)


def scan_part(scope: Scope, need: StateNeed) -> StatePart:
    """Return the scan's part of the layer's state."""
    assert scope.layer is not None
    return StatePart(
        index=scope.layer, offset=need.scan_offset(scope.setting.dtype.itemsize), shape=need.scan
    )


def convolution(
    scope: Scope,
    need: StateNeed,
    name: str,
    channels: KeptRows,
    *,
    biased: bool,
    silu: bool,
    factors: torch.Tensor | None = None,
) -> CausalConv:
    """Declare a convolution. factors: ``[channels]``, multipliers of its inputs; None for 1."""
    assert scope.layer is not None
    taps = need.conv[0] + 1

    def by_tap(weight: torch.Tensor) -> torch.Tensor:
        by_taps = weight.squeeze(1).t()
        return by_taps if factors is None else by_taps * factors.to(by_taps.device)

    return CausalConv(
        state=StatePart(index=scope.layer, offset=0, shape=need.conv),
        weight=parameter(scope, f"{name}.weight", channels, 1, taps, take=by_tap),
        bias=parameter(scope, f"{name}.bias", channels) if biased else None,
        silu=silu,
    )


class Mamba:
    """Mamba: a gated short convolution, then a scan; time steps, inputs and outputs are projections of the convolution.

    Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023), figure 3::

        x ─ in ─┬─ conv ─┬──────────────── scan ─ · ─ out
                │        └─ dt, b, c ────────┘    │
                └─ gate ─ silu ───────────────────┘
    """

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


class Mamba2:
    """Mamba 2: one projection gives gate, channels, inputs, outputs and time steps; the middle three are convolved, then scanned.

    Dao and Gu, "Transformers are SSMs" (2024), figure 6::

        x ─ in ─┬─ channels, b, c ─ conv ─┬─ scan ─ · ─ norm ─ out
                ├─ dt ────────────────────┘         │
                └─ gate ─ silu ─────────────────────┘
    """

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


class ShortConv:
    """Gated short convolution (LFM2): ``out(c * conv(b * x))``, with one projection for all three."""

    def __init__(self, scope: Scope, spec: ShortConvSpec) -> None:
        channels = scope.share.of(spec.channels)
        self._channels = channels.count
        self._in = scope.linear(
            KeptRows(*3 * [channels]).parts(scope, "in_proj"), scope.hidden_size, biased=spec.biased
        )
        need = scope.share.of_state(spec).state_need
        self._conv = convolution(scope, need, "conv", KeptRows(channels), biased=spec.biased, silu=False)
        self._out = output(scope, "out_proj", channels, scope.hidden_size, biased=spec.biased)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        width = self._channels
        projected = ops.linear(self._in, x)
        b, c, x = (ops.columns(projected, i * width, width) for i in range(3))
        return ops.linear(self._out, ops.multiply(c, ops.causal_conv(self._conv, ops.multiply(b, x))))


class Delta:
    """The gated delta rule with a short convolution before it and a gated norm after it (Qwen3-Next).

    Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024), figure 1::

        x ─┬─ q, k, v ─ conv ─┬─ delta rule ─ norm ─ · ─ out
           ├─ alpha, beta ────┘                      │
           └─ gate ─ silu ───────────────────────────┘
    """

    def __init__(self, scope: Scope, spec: DeltaSpec) -> None:
        share, own = scope.share, scope.share.of_state(spec)
        self._spec = own
        heads, key_heads, need = share.of(spec.num_heads), share.of_kv_heads(spec.key_heads), own.state_need
        keys, values = key_heads.times(spec.key_dim), heads.times(spec.head_dim)
        self._in = scope.linear(_delta_parts(scope, spec, keys, values, heads), scope.hidden_size)
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


def _delta_parts(
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
