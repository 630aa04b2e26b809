"""The experts of one layer: declared while a model is built, filled by a loader, then used."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch

from quintet.executor.cards.routing import Routing
from quintet.executor.cards.share import Kept
from quintet.executor.ops.experts import ExpertTables, Gate, experts, route
from quintet.executor.ops.host_experts import HostExperts
from quintet.executor.quant.stack import StackMethod, StackShape
from quintet.executor.weights.plan import WeightPlan

__all__ = ["Experts", "Gate"]


class StackQuantization(Protocol):
    """As much of a quantization as experts need."""

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """See `quintet.executor.quant.method.Quantization`."""


class Experts:
    """``sum over chosen e of weight_e * down_e(gate(gate_up_e(x)))``; which are chosen, `Routing` makes of scores."""

    def __init__(
        self,
        quantization: StackQuantization,
        plan: WeightPlan,
        routing: Routing,
        gate: Gate,
        gate_up: StackShape,
        down: StackShape,
        correction: str | None = None,
        correction_in_row: bool = False,
        *,
        kept: Kept | None = None,
        is_partial: bool = False,
    ) -> None:
        """correction: name of the tensor that is added to scores for choosing; None for none. In a row: of a matrix.

        kept: the experts that are here; None: all. is_partial: whether other ranks have others, or other columns of each, so that
        the result is a part of each sum.
        """
        assert gate_up.columns == 2 * down.depth and gate_up.depth == down.columns, (gate_up, down)
        self.routing = routing
        self.gate = gate
        self.is_partial = is_partial
        self.kept = kept or Kept(0, routing.experts, routing.experts)
        self.hidden = gate_up.depth
        self.widest = max(gate_up.columns, gate_up.depth)
        """Numbers of a chosen expert's row, at most."""
        self.gate_up: StackMethod = quantization.stack(gate_up, plan)
        self.down: StackMethod = quantization.stack(down, plan)
        self.correction: torch.Tensor | None = None
        """fp32 ``[experts]``, whatever the model's number format is: it decides between scores that are close."""
        if correction is not None:
            self.correction = torch.empty(routing.experts, dtype=torch.float32, device=plan.device)
            shape = (1, routing.experts) if correction_in_row else (routing.experts,)
            filled = self.correction.view(shape)
            plan.expect(correction, shape, filled.copy_, num_bytes=4 * routing.experts)

    @cached_property
    def host(self) -> HostExperts | None:
        """What the host kernels are told, once the weights are there; None where torch computes."""
        if self.gate_up.packed is None or self.down.packed is None:
            return None
        down_bias = self.down.bias
        if self.is_partial and down_bias is not None:
            down_bias = down_bias.float()  # part of a sum in fp32
        return HostExperts(
            self.routing,
            self.gate,
            self.gate_up.packed,
            self.down.packed,
            correction=self.correction,
            gate_up_bias=self.gate_up.bias,
            down_bias=down_bias,
            int8_activations=self.gate_up.int8_activations,
            first=self.kept.begin,
        )

    @property
    def tables(self) -> ExpertTables:
        """What torch multiplies, where there are no packed weights."""
        assert self.gate_up.table is not None and self.down.table is not None, "the weights are packed"
        return ExpertTables(self.gate_up.table, self.down.table, self.gate_up.bias, self.down.bias)

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's sum. x: ``[tokens, hidden]``; scores: ``[tokens, experts]``. May wait for a device."""
        if self.host is not None:
            return self.host(x, scores)
        ids, weights = route(scores, self.routing, self.correction)
        return experts(x, ids, weights, self.tables, self.gate, self.routing.scaled_inputs)
