"""Sampling settings: one record per slot, read by the reference and the host kernels."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quintet.wire.params import SamplingParams

Settings: TypeAlias = NDArray[np.void]
"""Records of `RECORD`: of every slot, or of some rows."""

RECORD = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy, the other fields are unused
        ("log_min_p", np.float32),  # -inf: none
        ("top_k", np.int64),  # 0: none
        ("top_p", np.float64),  # 1: none
        ("seed", np.uint64),
    ]
)
"""The layout in csrc/cpu/ops/sampling.hpp."""

SEED_MASK = (1 << 64) - 1


def settings_table(num_slots: int) -> Settings:
    """Return records of ``num_slots`` slots, all greedy."""
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
