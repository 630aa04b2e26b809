"""Tokens that a draw may return, by the definition in fp64, and settings that cover every path of a sampling kernel.

Kernels round sums of weights in their own order. A draw may differ from the reference if its random number, or the mass that
top-p compares, is within `NOISE` of a border. `acceptable` computes the borders and returns the correct tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.sampling.settings import RECORD, Settings, settings_of
from quintet.wire.params import SamplingParams

NOISE = 1e-5
"""An exponent of up to 87 is rounded twice (2^-24 each), the exponential adds 2^-22, a sum of 128 numbers 2^-20."""


def table(params: list[SamplingParams]) -> Settings:
    return np.array([settings_of(each, 1000 + 7 * i) for i, each in enumerate(params)], RECORD)


def positions_of(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(count, dtype=np.int64) + 11


def acceptable(logits: torch.Tensor, settings: Settings, uniforms: torch.Tensor) -> list[set[int]]:
    """Return the tokens that each row may draw, by the definition in fp64. Logits are divided in fp32, as defined."""
    out = []
    for values, mine, number in zip(logits.float(), settings, uniforms.tolist(), strict=True):
        z = values / float(mine["temperature"])
        floor = torch.tensor(-torch.inf)
        if mine["log_min_p"] > -np.inf:
            floor = z.max() + torch.tensor(mine["log_min_p"])
        if 0 < mine["top_k"] < len(z):
            alive = z[z >= floor]
            if len(alive) >= mine["top_k"]:
                floor = alive.topk(int(mine["top_k"])).values[-1]
        shares = torch.where(z >= floor, (z.double() - z.max().double()).exp(), 0.0)
        shares /= shares.sum()
        floors = [float(floor)]
        if mine["top_p"] < 1.0:
            ordered, order = z.sort(descending=True)
            mass = shares[order].cumsum(0)
            first = int((mass < mine["top_p"] - NOISE).sum())
            last = int((mass < mine["top_p"] + NOISE).sum())
            floors = sorted({float(v) for v in ordered[first : last + 1] if v >= floor})
        tokens: set[int] = set()
        for least in floors:
            kept = torch.where(z >= least, shares, 0.0)
            ends = (kept / kept.sum()).cumsum(0)
            right = (kept > 0) & (number < ends + NOISE) & (number > ends - kept / kept.sum() - NOISE)
            tokens |= set(right.nonzero().squeeze(1).tolist())
        out.append(tokens)
    return out


FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 7},
    "one": {"top_k": 1},
    "wide top-k": {"top_k": 400, "temperature": 1.7},
    "very wide top-k": {"top_k": 3000},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "wide top-p": {"top_p": 0.99, "temperature": 1.9},
    "narrow top-p": {"top_p": 0.01},
    "min-p": {"min_p": 0.1},
    "strict min-p": {"min_p": 1.0, "temperature": 0.9},
    "top-k, top-p": {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    "wide top-k, top-p": {"top_k": 900, "top_p": 0.9, "temperature": 1.4},
    "min-p, top-p": {"min_p": 0.001, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.05},
}
