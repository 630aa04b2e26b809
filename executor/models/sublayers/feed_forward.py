"""Feed-forward with a gate, ``down(activation(gate x) * up x)`` (Shazeer, "GLU variants", 2020), or without."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.model_config.spec import Activation, LearnedActivation, MlpLayout, MlpSpec
from quintet.executor.models.forward import ForwardPass, ValueT, norm_of_all
from quintet.executor.models.layers.linear import GatedActivation, Linear
from quintet.executor.models.sublayers.scope import Scope


class FeedForward:
    """A `quintet.executor.models.sublayers.layer.Sublayer`."""

    def __init__(self, scope: Scope, spec: MlpSpec) -> None:
        names, wide, kept = scope.names, spec.width, scope.share.of(spec.width)
        if not spec.gated:
            parts = [scope.part(names.up, wide)]
        elif spec.layout is MlpLayout.STACKED:
            parts = [scope.part(names.gate_up, wide, 2 * wide, begin) for begin in (0, wide)]
        else:
            parts = [scope.part(names.gate, wide), scope.part(names.up, wide)]
        parts, wide = [part.keeping(kept) for part in parts], kept.count
        self._gate_multiplier, self._down_multiplier = spec.gate_multiplier, spec.down_multiplier
        self._gate_width = wide if spec.gated and spec.gate_multiplier != 1.0 else 0
        gates, self._learned = GatedActivation.NONE, None
        self._activation: Activation | None = None
        match spec.activation:
            case LearnedActivation():
                self._learned = _learned(scope, spec)
            case kind if spec.gated and not self._gate_width:
                gates = GatedActivation.of(kind)
            case kind:
                self._activation = kind
        self._gate: Linear | None = None
        shape = LinearShape(parts, scope.hidden_size, spec.biased, gates)
        if gates and not scope.pairs(shape):
            assert isinstance(spec.activation, Activation), spec
            self._gate_kind, gates = spec.activation, GatedActivation.NONE
            self._gate = scope.linear(parts[:1], scope.hidden_size, biased=spec.biased)
            parts = parts[1:]
        self._up = scope.linear(parts, scope.hidden_size, biased=spec.biased, activation=gates)
        self._norm, self._kept = scope.norm(spec.down_norm, names.down_norm, kept.whole), kept
        down = scope.part(names.down, scope.hidden_size).of_inputs(kept, scope.share.own_leaves)
        self._down = scope.linear([down], wide, biased=spec.biased)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        up = ops.linear(self._up, x)
        if self._gate is not None:
            up = ops.multiply(ops.activation(ops.linear(self._gate, x), self._gate_kind), up)
        if self._activation is not None:
            up = self._activated(ops, up, self._activation)
        if self._learned is not None:
            up = ops.xielu(up, self._learned)
        if self._norm is not None:
            up = norm_of_all(ops, up, self._norm, self._kept)
        down = ops.linear(self._down, up)
        return down if self._down_multiplier == 1.0 else ops.scale(down, self._down_multiplier)

    def _activated(self, ops: ForwardPass[ValueT], up: ValueT, activation: Activation) -> ValueT:
        """Return the activation that the linear layer does not fuse: a plain one, or one of scaled gates."""
        width = self._gate_width
        if not width:
            return ops.activation(up, activation)
        gates = ops.scale(ops.columns(up, 0, width), self._gate_multiplier)
        return ops.multiply(ops.activation(gates, activation), ops.columns(up, width, width))


def _learned(scope: Scope, spec: MlpSpec) -> torch.Tensor:
    """Declare xIELU's parameters unless the spec has them; see `quintet.executor.backends.cpu.ops.activation.xielu`."""
    if spec.curve is not None:
        numbers = torch.tensor(spec.curve)
        numbers[:2] = F.softplus(numbers[:2])
        return numbers.to(scope.weights.device)
    numbers = torch.empty(4, device=scope.weights.device)
    shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    for place, (name, shape) in zip(numbers, shapes.items(), strict=True):
        filled = place.view(shape)

        def fill(tensor: torch.Tensor, filled: torch.Tensor = filled, is_alpha: bool = bool(shape)) -> None:
            filled.copy_(F.softplus(tensor.float()) if is_alpha else tensor)

        scope.weights.expect(scope.name(f"{scope.names.activation}.{name}"), shape, fill, num_bytes=4)
    return numbers
