"""Routing of tokens to experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

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
