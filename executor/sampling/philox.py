"""Counter-based random numbers: a function of a request's seed and a position only.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. There is no
state to store or transfer, and a draw does not depend on the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLY_0, _MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox4x32(
    counters: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return four 32-bit words (as uint64) per counter. The counter's upper 64 bits are 0."""
    c0, c1 = counters & _LOW, counters >> _32
    c2 = c3 = np.zeros_like(counters)
    k0, k1 = keys & _LOW, keys >> _32
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in (0, 1) per row, with 52 random bits."""
    high, low, _, _ = philox4x32(positions.astype(np.uint64), seeds)
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
