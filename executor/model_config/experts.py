"""What a reader says of a layer's experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quintet.executor.model_config.routing import Routing


class ExpertsLayout(StrEnum):
    """How a checkpoint holds the experts' weights. E experts, H hidden, W an expert's width."""

    SEPARATE = "separate"
    """Tensors of each expert: `Names.expert_gate`, `Names.expert_up`, `Names.expert_down`."""
    STACKED = "stacked"
    """`Names.experts_gate_up` ``[E, 2 W, H]``, gates first, and `Names.experts_down` ``[E, H, W]``."""
    TRANSPOSED = "transposed"
    """The same two, ``[E, H, 2 W]`` and ``[E, W, H]``."""
    ALTERNATING = "alternating"
    """As transposed; gates and ups take turns, and so do their biases."""
    MXFP4 = "mxfp4"
    """``[E, 2 W, H / 32, 16]``, gates and ups taking turns, and ``[E, H, W / 32, 16]`` bytes of two 4-bit numbers each, with the
    exponent of each 16 bytes beside them (Open Compute Project, "Microscaling formats (MX) specification", 2023)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Gated feed-forwards of which each token goes through a few, those that `Names.router` scores highest."""

    routing: Routing
    width: int
    """Of each expert. Its gates' activation is silu."""
    layout: ExpertsLayout = ExpertsLayout.SEPARATE
    router_bias: bool = False
    corrected: bool = False
    """Whether `Names.correction` is added to the scores for choosing alone."""
    correction_in_row: bool = False
    """Whether the checkpoint has it as a matrix of one row."""
    biased: bool = False
    """Whether each expert's layers have biases: `Names.experts_gate_up_bias`, `Names.experts_down_bias`, both stacked."""
    clamp: tuple[float, float] | None = None
    """Factor and limit where it is ``g sigmoid(factor g) (u + 1)`` instead, of gates and ups that are clamped to the limit."""
    shared_width: int | None = None
    """Of a feed-forward of the same kind that every token goes through besides: `Names.shared_gate` and so on."""
    shared_stacked: bool = False
    """Whether its gates and ups are one tensor, `Names.shared_gate_up`."""
    shared_gated: bool = False
    """Whether what it gives is multiplied with the logistic function of `Names.shared_router`."""

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices, stacked biases and a correction in a row among them."""
        experts, shared = self.routing.experts, self.shared_width or 0
        vectors = experts * (2 * self.width + hidden_size) if self.biased else 0
        vectors += experts if self.correction_in_row else 0
        return hidden_size * (experts * (3 * self.width + 1) + 3 * shared + self.shared_gated) + vectors
