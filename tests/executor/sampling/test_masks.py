"""Masked draws by the kernels and by the reference; masks combined with other sampling parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.executor.sampling.acceptable_draws import positions_of, table

from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.host_kernels import draw_on_host
from quintet.executor.sampling.masks import Masks, mask_words
from quintet.wire.params import SamplingParams

ROWS = 12
MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(),
    "top_k": SamplingParams(top_k=3, temperature=0.5),
    "top_p": SamplingParams(top_p=0.7, min_p=0.01),
}


def masks_of(vocab_size: int, allowed: list[list[int]], extra: int = 0) -> Masks:
    """One draw for each mask, which are in another order; ``extra`` bits beyond the vocabulary are set."""
    words = mask_words(len(allowed), vocab_size + extra)
    rows = np.arange(len(allowed))[::-1].copy()
    for row, tokens in zip(rows.tolist(), allowed, strict=True):
        for token in [*tokens, *range(vocab_size, vocab_size + extra)]:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return Masks(words, np.where([bool(tokens) for tokens in allowed], rows, -1))


def draw_on_both(
    logits: torch.Tensor, params: list[SamplingParams], masks: Masks
) -> tuple[list[int], list[int]]:
    slots = np.arange(len(params))
    one, other = (
        method(logits, table(params), slots, positions_of(len(params)), None, masks).tolist()
        for method in (draw_on_host, draw)
    )
    return one, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [40, 129, 5003])
@pytest.mark.parametrize("mode", MODES)
def test_a_masked_row_draws_as_if_other_logits_were_minus_infinity(
    dtype: torch.dtype, vocab_size: int, mode: str
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(ROWS, vocab_size, generator=generator) * 4).to(dtype)
    allowed = [
        torch.randperm(vocab_size, generator=generator)[: 1 + 5 * i].tolist() if i % 3 else []
        for i in range(ROWS)
    ]
    alone = torch.full((ROWS, vocab_size), -torch.inf)
    for row, tokens in enumerate(allowed):
        kept = tokens or list(range(vocab_size))
        alone[row, kept] = logits[row, kept].float()
    masks = masks_of(vocab_size, allowed, extra=70)
    params = [MODES[mode]] * ROWS
    expected = draw_on_host(alone, table(params), np.arange(ROWS), positions_of(ROWS)).tolist()
    assert draw_on_both(logits, params, masks) == (expected, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("logit", [-torch.inf, torch.nan, torch.inf, -3e38])
def test_a_mask_holds_for_any_logits(mode: str, logit: float) -> None:
    allowed = [[37], [5, 90], list(range(64, 70))]
    logits = torch.zeros(3, 100)
    for row, tokens in enumerate(allowed):
        logits[row, tokens] = logit
    for drawn in draw_on_both(logits, [MODES[mode]] * 3, masks_of(100, allowed)):
        assert all(token in tokens for token, tokens in zip(drawn, allowed, strict=True))
