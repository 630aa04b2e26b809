"""Prompt log-probabilities equal a plain forward pass of transformers, with any chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quintet.wire.codec import unpack_f32, unpack_i32
from quintet.wire.params import SamplingParams

PROMPTS = [[(3 * i + n) % 89 for i in range(n)] for n in (1, 2, 11, 40)]
WIDTH = 4


@pytest.mark.parametrize("chunk", [1000, 1, 6])
def test_prompt_logprobs_join_across_chunks(chunk: int, serve: Callable[..., Any]) -> None:
    served = serve(
        transformers.LlamaConfig(
            vocab_size=89,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    core = served.core
    params = SamplingParams(temperature=0.0, prompt_logprobs=WIDTH - 1, logprobs=1, max_tokens=None)
    requests = [core.add(prompt, max_tokens=3, params=params) for prompt in PROMPTS]
    core.add(PROMPTS[2], max_tokens=3)  # a request without log-probabilities
    core.run(chunk=chunk)

    for request, prompt in zip(requests, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = torch.log_softmax(served.reference(torch.tensor([request.tokens])).logits[0], -1)
        entries = []
        for rows, result in core.results:
            for report in result.prompt_logprobs:
                if rows[report.row] is request:
                    assert report.first == 1 + len(entries)
                    assert report.width == WIDTH
                    ids = np.reshape(unpack_i32(report.token_ids), (-1, WIDTH))
                    values = np.reshape(unpack_f32(report.logprobs), (-1, WIDTH))
                    entries += list(zip(ids, values, unpack_i32(report.ranks), strict=True))
        assert [int(ids[0]) for ids, _, _ in entries] == prompt[1:]
        for position, (ids, values, rank) in enumerate(entries):
            of_position = expected[position]
            np.testing.assert_allclose(values, of_position[ids.tolist()], atol=1e-4)
            assert sorted(values[1:], reverse=True) == list(values[1:])
            assert rank == int((of_position > of_position[int(ids[0])]).sum()) + 1

        drawn = [
            (unpack_i32(report.token_ids)[0], unpack_f32(report.logprobs)[0])
            for rows, result in core.results
            for report in result.logprobs
            if rows[report.row] is request
        ]
        assert [token for token, _ in drawn] == request.outputs
        at = [expected[len(prompt) - 1 + i, token] for i, token in enumerate(request.outputs)]
        np.testing.assert_allclose([value for _, value in drawn], at, atol=1e-4)
