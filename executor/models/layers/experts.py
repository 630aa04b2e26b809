"""The experts of one layer: declared with the model, filled by a loader."""

from __future__ import annotations

from functools import cached_property

import torch

from quintet.executor.backends.cpu.ops.experts import ExpertTables, Gate, experts, route
from quintet.executor.backends.cpu.ops.host_experts import ALL_HERE, Homes, HostExperts
from quintet.executor.checkpoints.quant.method import Quantization
from quintet.executor.checkpoints.quant.stack import StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.experts import Routing
from quintet.executor.model_config.share import WHOLE, Share

__all__ = ["Experts", "Gate"]


class Experts:
    """``sum over chosen e of weight_e * down_e(gate(gate_up_e(x)))``; `Routing` selects the experts from scores."""

    def __init__(
        self,
        quantization: Quantization,
        plan: WeightPlan,
        routing: Routing,
        gate: Gate,
        gate_up: StackShape,
        down: StackShape,
        correction: str | None = None,
        correction_in_row: bool = False,
        *,
        share: Share = WHOLE,
    ) -> None:
        """correction: name of a tensor added to scores for the selection; None for none. correction_in_row: it is a matrix.

        share: the rank's experts, or its columns of all.
        """
        assert gate_up.columns == 2 * down.depth and gate_up.depth == down.columns, (gate_up, down)
        self.routing = routing
        self.gate = gate
        self.is_partial = not share.is_all
        """True if other ranks have other experts, or other columns of each."""
        self.kept = share.of_experts(routing.experts)
        self.homes = Homes(share.rank, share.size, share.places) if share.by_experts else ALL_HERE
        self.hidden = gate_up.depth
        self.widest = max(gate_up.columns, gate_up.depth)
        """Maximum row width of a chosen expert, in elements."""
        self.gate_up: StackMethod = quantization.stack(gate_up, plan)
        self.down: StackMethod = quantization.stack(down, plan)
        self.correction: torch.Tensor | None = None
        """fp32 ``[experts]`` for every model dtype, because it decides between close scores."""
        if correction is not None:
            self.correction = torch.empty(routing.experts, dtype=torch.float32, device=plan.device)
            shape = (1, routing.experts) if correction_in_row else (routing.experts,)
            filled = self.correction.view(shape)
            plan.expect(correction, shape, filled.copy_, num_bytes=4 * routing.experts)

    @cached_property
    def host(self) -> HostExperts | None:
        """Arguments of the host kernels, after loading; None if torch computes."""
        if self.gate_up.packed is None or self.down.packed is None:
            return None
        return HostExperts(
            self.routing,
            self.gate,
            self.gate_up.packed,
            self.down.packed,
            correction=self.correction,
            gate_up_bias=self.gate_up.bias,
            down_bias=self.down.bias,
            inputs=(self.gate_up.inputs, self.down.inputs),
            homes=self.homes,
        )

    @property
    def tables(self) -> ExpertTables:
        """Weights for torch, if they are not packed."""
        assert self.gate_up.table is not None and self.down.table is not None, "the weights are packed"
        return ExpertTables(self.gate_up.table, self.down.table, self.gate_up.bias, self.down.bias)

    def __call__(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's weighted sum; may synchronize with a device.

        x: ``[tokens, hidden]``; scores: ``[tokens, experts]``.
        """
        if self.host is not None:
            return self.host(x, scores)
        ids, weights = route(scores, self.routing, self.correction)
        return experts(x, ids, weights, self.tables, self.gate, self.routing.scaled_inputs)
