"""Quantization wrapper that rounds inputs of integer layers to 8 bits (``--activation-dtype int8``)."""

from __future__ import annotations

from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.stack import PackedStack, StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan


class RoundedInputs:
    """See `quintet.executor.checkpoints.quant.method.Quantization`. Inputs of the output layer and of exact layers are
    not rounded."""

    def __init__(self, inner: Quantization) -> None:
        """inner: makes the layers."""
        self._inner = inner
        self.num_layers = 0
        """Number of layers with rounded inputs so far."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """See `Quantization.linear`."""
        method = self._inner.linear(shape, plan)
        if not shape.is_output_layer and not shape.is_exact:
            rounded = [run.round_inputs() for run in method.runs]
            self.num_layers += any(rounded)
        return method

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        """See `Quantization.embedding`."""
        return self._inner.embedding(shape, plan)

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        """See `Quantization.pairs`."""
        return self._inner.pairs(shape, plan)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """See `Quantization.stack`."""
        method = self._inner.stack(shape, plan)
        if isinstance(method, PackedStack) and not shape.is_exact:
            self.num_layers += method.round_inputs()
        return method
