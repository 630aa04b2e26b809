"""Mixture of experts: a router selects experts per token; a shared expert, if present, processes every token.

Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017. Shared
experts: Dai et al., "DeepSeekMoE", 2024.
"""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.spec import Activation, MlpLayout, MlpSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.experts import Experts, Gate
from quintet.executor.models.layers.linear import GatedActivation, Linear
from quintet.executor.models.sublayers.expert_weights import down_of, gate_up_of
from quintet.executor.models.sublayers.feed_forward import FeedForward
from quintet.executor.models.sublayers.scope import Scope


class MixtureOfExperts:
    """A `quintet.executor.models.sublayers.sublayer.Sublayer`."""

    def __init__(self, scope: Scope, spec: ExpertsSpec) -> None:
        names, count = scope.names, spec.routing.experts
        self._router = scope.linear(
            [scope.part(names.router, count)], scope.hidden_size, biased=spec.router_bias, is_exact=True
        )
        self._experts = Experts(
            scope.setting.quantization,
            scope.weights,
            spec.routing,
            _gate_of(spec),
            gate_up_of(scope, spec),
            down_of(scope, spec),
            scope.name(names.correction) if spec.corrected else None,
            spec.correction_in_row,
            share=scope.share,
        )
        self._shared = None
        if spec.shared_width is not None:
            layout = MlpLayout.STACKED if spec.shared_stacked else MlpLayout.SEPARATE
            shared = MlpSpec(width=spec.shared_width, activation=Activation.SILU, layout=layout)
            self._shared = FeedForward(replace(scope, names=_names_of_shared(names)), shared)
        self._shared_router: Linear | None = None
        if spec.shared_gated:
            self._shared_router = scope.linear(
                [scope.part(names.shared_router, 1)], scope.hidden_size, is_exact=True
            )

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        y = ops.experts(self._experts, x, ops.linear(self._router, x))
        if self._shared is None:
            return y
        shared = self._shared(ops, x)
        if self._shared_router is not None:
            gate = ops.activation(ops.linear(self._shared_router, x), Activation.SIGMOID)
            shared = ops.multiply(shared, gate)
        return ops.add(y, shared)


def _gate_of(spec: ExpertsSpec) -> Gate:
    if spec.clamp is None:
        return Gate(activation=GatedActivation.SILU_AND_MUL)
    factor, limit = spec.clamp
    return Gate(activation=GatedActivation.CLAMPED_SWIGLU, factor=factor, limit=limit)


def _names_of_shared(names: Names) -> Names:
    """Return ``names`` with the shared expert's tensors as those of a feed-forward."""
    return replace(
        names,
        gate=names.shared_gate,
        up=names.shared_up,
        gate_up=names.shared_gate_up,
        down=names.shared_down,
    )
