"""How tokens choose their experts. Imports no torch: a spec has it, layers and kernels follow it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_EXPERTS = 1024
MAX_CHOSEN = 64
"""What the kernels take (``csrc/cpu/experts.hpp``): more than any model has."""


class Scoring(IntEnum):
    """What becomes of a token's scores; the codes are those of ``csrc/cpu/experts.hpp``."""

    SOFTMAX = 0
    """Their softmax over all experts."""
    SIGMOID = 1
    """Each one's logistic function."""
    SOFTMAX_OF_CHOSEN = 2
    """The softmax of those that are chosen; they are chosen by the scores themselves."""
    SPARSE_MIXER = 3
    """One after the other, the largest of those that are left: its share of a softmax over all of those that are near it, see
    `Routing.jitter` (Liu et al., "GRIN: gradient-informed MoE", 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of every token the ``chosen`` experts with the largest scores, of equal ones those with the lower number.

    Where there are ``groups`` of neighbouring experts, only those of the ``chosen_groups`` best are to be had: a group is worth
    the sum of its ``group_best`` largest (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.1.2).
    """

    experts: int
    chosen: int
    scoring: Scoring
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    """Whether a token's weights are divided by their sum and ``addend``."""
    addend: float = 1e-20
    jitter: float = 0.0
    """Of `Scoring.SPARSE_MIXER`: near are scores that are less by at most ``2 * jitter`` of the larger magnitude of the two."""
    scale: float = 1.0
    """Factor of every weight, last."""
    scaled_inputs: bool = False
    """Whether the weight multiplies what goes into an expert, rather than what comes out."""
