"""Draws follow the required distribution: chi-square tests with fixed seeds.

Each statistic is compared with the 1 - 1e-4 quantile: a correct sampler would fail for one choice of seeds in ten thousand.
Seeds are fixed, so results are deterministic. The checks at the end show that the test detects a wrong distribution.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.executor.conftest import Drawer, SamplerBench
from tests.executor.sampling.test_sampling import (
    min_p_reference,
    probabilities,
    temperature_reference,
    top_k_reference,
    top_p_reference,
)

from quintet.wire.params import SamplingParams

VOCAB = 40
ROWS = 1000
POSITIONS = 12
LOGITS = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5).tolist()


def counts_of(params: SamplingParams) -> list[int]:
    """Draw once per row and position from the same logits; return the count of each token."""
    bench = SamplerBench(VOCAB, max_num_seqs=ROWS)
    logits = torch.tensor(LOGITS).expand(ROWS, VOCAB)
    counts = [0] * VOCAB
    for length in range(1, 1 + POSITIONS):
        rows = [Drawer(params, prompt=[0] * length, seed=1000 + i) for i in range(ROWS)]
        for token in bench.draw(rows, logits, slots=list(range(ROWS)))[0]:
            counts[token] += 1
    return counts


def chi_square(counts: list[int], shares: list[float]) -> tuple[float, float]:
    """Return the statistic and its 1 - 1e-4 quantile (Wilson and Hilferty, 1931). Rare tokens are pooled."""
    total, pooled_count, pooled_share, statistic, cells = sum(counts), 0, 0.0, 0.0, 0
    for count, share in zip(counts, shares, strict=True):
        if share == 0.0:
            assert count == 0, "a token of probability 0 was drawn"
        elif share * total < 5:
            pooled_count, pooled_share = pooled_count + count, pooled_share + share
        else:
            statistic += (count - share * total) ** 2 / (share * total)
            cells += 1
    if pooled_share:
        statistic += (pooled_count - pooled_share * total) ** 2 / (pooled_share * total)
        cells += 1
    freedom = max(1, cells - 1)
    z = 3.719  # 1 - 1e-4 quantile of the normal distribution
    return statistic, freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


CASES = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.4),
    "top-k": SamplingParams(top_k=7),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=15, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case: str) -> None:
    row = Drawer(CASES[case])
    shaped = LOGITS
    for reference in (temperature_reference, min_p_reference, top_k_reference, top_p_reference):
        shaped = reference(shaped, row)
    statistic, most = chi_square(counts_of(CASES[case]), probabilities(shaped))
    assert statistic < most


def test_a_wrong_temperature_is_detected() -> None:
    statistic, most = chi_square(counts_of(SamplingParams(temperature=1.1)), probabilities(LOGITS))
    assert statistic > most


def test_positions_draw_independently() -> None:
    """Successive draws of the same seeds: the joint distribution of pairs is the product."""
    bench, shares = SamplerBench(4, max_num_seqs=ROWS), [0.1, 0.2, 0.3, 0.4]
    logits = torch.tensor(shares).log().expand(ROWS, 4)
    pairs = [0] * 16
    before: list[int] | None = None
    for length in range(1, 1 + POSITIONS):
        rows = [Drawer(SamplingParams(), prompt=[0] * length, seed=i) for i in range(ROWS)]
        drawn, _ = bench.draw(rows, logits, slots=list(range(ROWS)))
        if length % 2 == 0 and before is not None:
            for first, second in zip(before, drawn, strict=True):
                pairs[4 * first + second] += 1
        before = drawn
    statistic, most = chi_square(pairs, [a * b for a in shares for b in shares])
    assert statistic < most
