"""What each slot's tenant draws with: one record per slot, which the reference and the host kernels read alike.

Knows how requests spell "none", and nothing of how a filter works.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quintet.wire.params import SamplingParams

Settings: TypeAlias = NDArray[np.void]
"""Records of `RECORD`: of every slot, or of some rows."""

RECORD = np.dtype(
    [
        ("temperature", np.float32),  # 0: the most likely token, and nothing below counts
        ("log_min_p", np.float32),  # -inf: none
        ("top_k", np.int64),  # 0: none
        ("top_p", np.float64),  # 1: none
        ("seed", np.uint64),
    ]
)
"""As csrc/cpu/sampling.hpp lays it out."""

SEED_MASK = (1 << 64) - 1


def settings_table(num_slots: int) -> Settings:
    """Return records of so many slots, all greedy."""
    return np.zeros(num_slots, RECORD)


def settings_of(params: SamplingParams, seed: int) -> tuple[float, float, int, float, int]:
    """Return the record of a request."""
    return (
        0.0 if params.greedy else params.temperature,
        float(np.log(np.float32(params.min_p))) if params.min_p > 0.0 else -np.inf,
        params.top_k,
        params.top_p,
        seed & SEED_MASK,
    )
