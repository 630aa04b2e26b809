"""Log-probabilities against torch.log_softmax: of drawn tokens, and of prompts across chunk borders."""

from __future__ import annotations

import numpy as np
import torch
from tests.executor.conftest import Drawer, SamplerBench

from quintet.wire.codec import unpack_f32, unpack_i32
from quintet.wire.params import SamplingParams

VOCAB = 60


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def test_the_drawn_token_and_its_rank_precede_the_most_likely() -> None:
    logits = logits_of(4)
    rows = [
        Drawer(SamplingParams(temperature=0.0, logprobs=3)),
        Drawer(SamplingParams(temperature=0.0)),
        Drawer(SamplingParams(logprobs=0, seed=1), seed=1),
        Drawer(SamplingParams(logprobs=5, top_k=2, logit_bias={3: 50.0}), seed=2),
    ]
    drawn, reports = SamplerBench(VOCAB).draw(rows, logits)
    expected = torch.log_softmax(logits, -1)
    assert [report.row for report in reports] == [0, 2, 3]
    assert drawn[3] == 3, "the bias must decide the draw"
    for report in reports:
        ids, values = unpack_i32(report.token_ids), unpack_f32(report.logprobs)
        num_top = rows[report.row].params.logprobs or 0
        of_row = expected[report.row]
        assert ids[0] == drawn[report.row]
        assert list(ids[1:]) == of_row.topk(num_top).indices.tolist()
        np.testing.assert_allclose(values, of_row[list(ids)], rtol=1e-6)  # raw: without bias and top-k
        assert report.rank == int((of_row > of_row[ids[0]]).sum()) + 1


def test_chosen_ids_replace_the_most_likely() -> None:
    logits = logits_of(1)
    _, reports = SamplerBench(VOCAB).draw(
        [Drawer(SamplingParams(temperature=0.0, logprob_token_ids=[9, 4, 30]))], logits
    )
    ids = unpack_i32(reports[0].token_ids)
    expected = torch.log_softmax(logits[0], -1)
    assert list(ids[1:]) == sorted([9, 4, 30], key=lambda token: -float(expected[token]))
    np.testing.assert_allclose(unpack_f32(reports[0].logprobs), expected[list(ids)], rtol=1e-6)


def test_the_whole_vocabulary_is_reported() -> None:
    _, reports = SamplerBench(VOCAB).draw(
        [Drawer(SamplingParams(temperature=0.0, logprobs=VOCAB))], logits_of(1)
    )
    assert sorted(unpack_i32(reports[0].token_ids)[1:]) == list(range(VOCAB))


def test_half_precision_logits_are_normalised_in_fp32() -> None:
    logits = logits_of(1).bfloat16()
    drawn, reports = SamplerBench(VOCAB).draw([Drawer(SamplingParams(temperature=0.0, logprobs=0))], logits)
    expected = torch.log_softmax(logits.float(), -1)[0, drawn[0]]
    np.testing.assert_allclose(unpack_f32(reports[0].logprobs), [expected], rtol=1e-6)
