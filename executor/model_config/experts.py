"""Specification of a layer's experts, and of the routing of tokens to them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

MAX_EXPERTS = 1024
MAX_CHOSEN = 64
"""Limits of the kernels (``csrc/cpu/ops/experts.hpp``)."""


class Scoring(IntEnum):
    """Function that converts router scores to weights; the codes are those of ``csrc/cpu/ops/experts.hpp``."""

    SOFTMAX = 0
    """Softmax over all experts."""
    SIGMOID = 1
    """Sigmoid of each score."""
    SOFTMAX_OF_CHOSEN = 2
    """Softmax over the selected experts; selection is by raw scores."""
    SPARSE_MIXER = 3
    """Repeated argmax without replacement.

    An expert's weight is its softmax share among the scores near the maximum,
    see `Routing.jitter` (Liu et al., "GRIN: gradient-informed MoE", 2024).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Top-k routing: each token uses the ``chosen`` experts with the largest scores; ties go to the lower index.

    With ``groups`` of consecutive experts, only the ``chosen_groups`` best groups are eligible. A group's value is
    the sum of its ``group_best`` largest scores (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.1.2).
    """

    experts: int
    chosen: int
    scoring: Scoring
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    """True if a token's weights are divided by their sum plus ``addend``."""
    addend: float = 1e-20
    jitter: float = 0.0
    """For `Scoring.SPARSE_MIXER`: two scores are near if they differ by at most ``2 * jitter`` of the larger magnitude."""
    scale: float = 1.0
    """Factor of every weight, applied last."""
    scaled_inputs: bool = False
    """True if the weight multiplies an expert's input instead of its output."""


class ExpertsLayout(StrEnum):
    """Layout of the experts' weights in a checkpoint. E experts, H hidden size, W an expert's width."""

    SEPARATE = "separate"
    """One tensor per expert: `Names.expert_gate`, `Names.expert_up`, `Names.expert_down`."""
    STACKED = "stacked"
    """`Names.experts_gate_up` ``[E, 2 W, H]``, gates first, and `Names.experts_down` ``[E, H, W]``."""
    TRANSPOSED = "transposed"
    """As `STACKED` with transposed tensors, ``[E, H, 2 W]`` and ``[E, W, H]``."""
    ALTERNATING = "alternating"
    """As `TRANSPOSED`, with interleaved gates and ups, biases included."""
    MXFP4 = "mxfp4"
    """``[E, 2 W, H / 32, 16]`` with interleaved gates and ups, and ``[E, H, W / 32, 16]``: bytes of two 4-bit numbers.

    Each 16 bytes share an exponent, in a separate tensor (Open Compute Project, "Microscaling formats (MX)
    specification", 2023).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Mixture of experts: gated feed-forward layers; `Names.router` selects the top-scoring ones for each token."""

    routing: Routing
    width: int
    """Width of each expert. The gates' activation is SiLU."""
    layout: ExpertsLayout = ExpertsLayout.SEPARATE
    router_bias: bool = False
    corrected: bool = False
    """True if `Names.correction` is added to the scores for the selection only."""
    correction_in_row: bool = False
    """True if the checkpoint stores the correction as a matrix with one row."""
    biased: bool = False
    """True if experts have biases: `Names.experts_gate_up_bias`, `Names.experts_down_bias`, both stacked."""
    clamp: tuple[float, float] | None = None
    """Factor and limit of ``g sigmoid(factor g) (u + 1)`` with gates and ups clamped to the limit; None for SiLU."""
    shared_width: int | None = None
    """Width of a shared expert, which processes every token: `Names.shared_gate` and so on; None without one."""
    shared_stacked: bool = False
    """True if the shared expert's gates and ups are one tensor, `Names.shared_gate_up`."""
    shared_gated: bool = False
    """True if the shared expert's output is multiplied by the sigmoid of `Names.shared_router`."""

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements, including stacked biases and a one-row correction."""
        experts, shared = self.routing.experts, self.shared_width or 0
        vectors = experts * (2 * self.width + hidden_size) if self.biased else 0
        vectors += experts if self.correction_in_row else 0
        return hidden_size * (experts * (3 * self.width + 1) + 3 * shared + self.shared_gated) + vectors
