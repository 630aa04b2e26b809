"""Penalties on the device, against the host's implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, new_row, plan_of

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.penalties import PENALIZED, DevicePenalties, penalize
from quintet.executor.backends.cuda.sampling import sampling_ops, shaping_on
from quintet.executor.sampling.logits_processor import DrawRows
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.sampler import SHAPING, Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams

SETTINGS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.9},
    {},
    {"repetition_penalty": 2.0, "frequency_penalty": 1.5},
]
VOCAB = 20_011
"""More ids than two blocks hold, and an odd number."""


def world(device: Device) -> tuple[SlotTables, DrawRows, list[SamplingParams]]:
    """Ten rows of a few prompt and output tokens, many of them repeated, at scattered slots."""
    tables = SlotTables(16, 700, full_layers(1, 1, 8, 4, 4), device.torch_device)
    random = np.random.default_rng(4)
    slots = random.permutation(16)[:10].astype(np.int64)
    num_prompt = random.integers(1, 300, 10)
    lengths = num_prompt + np.array([0, 1, 5, 40, 300, 300, 2, 90, 17, 0])
    tokens = random.integers(0, 60, (16, 701)) * 331  # of 60 ids, spread over all blocks
    tables.token_ids.copy_(torch.from_numpy(tokens.astype(np.int32)))
    tables.num_prompt_tokens[slots] = num_prompt
    params = [SamplingParams(**SETTINGS[i % len(SETTINGS)]) for i in range(10)]  # type: ignore[arg-type]
    return tables, DrawRows(tables, slots, lengths, num_prompt), params


def test_penalties(device: Device) -> None:
    """The reference adds a frequency up to 10 times, rounding each to 2^-20 or less; the kernel rounds once."""
    tables, rows, params = world(device)
    before = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    before[:, 331] = torch.tensor([torch.inf, -torch.inf] * 5)
    reference, kernel = Penalties(16), DevicePenalties(device, 16)
    wants = np.zeros(10, np.bool_)
    for i, slot in enumerate(rows.slots.tolist()):
        new = new_row(slot, Drawer(params[i]))
        wants[i] = reference.admit(new)
        assert kernel.admit(new) == wants[i]
    expected, found = before.clone(), before.to(device.torch_device)
    which = np.flatnonzero(wants)
    here = SlotTables(16, 700, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
    here.token_ids.copy_(tables.token_ids)
    reference.apply(expected, DrawRows(here, rows.slots, rows.lengths, rows.num_prompt), which)
    kernel.apply(found, rows, which)
    assert 0 < len(which) < 10
    assert not torch.equal(expected, before)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5)
    untouched = torch.ones(VOCAB, dtype=torch.bool)
    untouched[::331] = False
    assert torch.equal(found.cpu()[:, untouched], before[:, untouched])

    for i in which.tolist():  # alone, the same bits
        one = before[i : i + 1].to(device.torch_device)
        kernel.apply(one, rows.take(np.array([i])), np.array([0]))
        assert torch.equal(one[0], found[i])


def test_counts_cover_the_last_id_only(device: Device) -> None:
    """A row inside a wider buffer; the ids at both ends of the vocabulary; a record of no slot."""
    buffer = torch.zeros(2, VOCAB + 5, device=device.torch_device)
    tables = torch.tensor(
        [[VOCAB - 1, 0, VOCAB - 1, VOCAB, -1]], dtype=torch.int32, device=device.torch_device
    )
    records = np.array([(0, 0, 5, 0, 1.0, 0.5, 1.0, 0), (1, -1, 5, 0, 1.0, 0.5, 1.0, 0)], PENALIZED)
    penalized = torch.from_numpy(records.view(np.int32).reshape(2, 8)).to(device.torch_device)
    penalize(device, buffer[:, :VOCAB], tables, penalized)
    expected = torch.zeros(2, VOCAB + 5)
    expected[0, 0], expected[0, VOCAB - 1] = -1.5, -2.5
    assert torch.equal(buffer.cpu(), expected)


def test_other_layouts_are_rejected(device: Device) -> None:
    logits = torch.zeros(2, 50, device=device.torch_device)
    tables = torch.zeros(1, 5, dtype=torch.int32, device=device.torch_device)
    penalized = torch.zeros(2, 8, dtype=torch.int32, device=device.torch_device)
    with pytest.raises(ValueError, match=r"logits is torch\.bfloat16"):
        penalize(device, logits.bfloat16(), tables, penalized)
    with pytest.raises(ValueError, match="token_ids is"):
        penalize(device, logits, tables.long(), penalized)
    with pytest.raises(ValueError, match=r"expected torch\.int32\[rows, 8\]"):
        penalize(device, logits, tables, penalized[:, :7])


def test_sampler_results_equal_with_and_without_kernels(device: Device) -> None:
    """Shaped and plain rows, greedy and random, some with log-probabilities, through the sampler's public function."""
    vocab_size, count = 300, 12
    choices = [
        {"temperature": 0.0},
        {"top_k": 5, "frequency_penalty": 0.5},
        {"top_p": 0.7, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    ]
    drawers = [
        Drawer(SamplingParams(**choices[i % 4]), outputs=[7, 7, 9 + i], seed=100 + i)  # type: ignore[arg-type]
        for i in range(count)
    ]
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(6)) * 2
    plan = plan_of(drawers, list(range(count)))
    results = []
    cpu = torch.device("cpu")
    for where, ops, shaping in (
        (cpu, SamplingOps(), SHAPING),
        (device.torch_device, sampling_ops(device), shaping_on(device)),
    ):
        tables = SlotTables(16, 64, full_layers(1, 1, 8, 4, 4), where)
        sampler = Sampler(16, vocab_size, tables, ops, shaping)
        tables.apply(plan)
        for row in plan.new_rows:
            sampler.admit(row)
        drawn, reports = sampler.draw(Rows(plan), logits.to(where))
        results.append((drawn.tolist(), reports, tables.token_ids.cpu()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][2], results[1][2])
    assert len(results[0][1]) == count // 2
    for mine, other in zip(results[0][1], results[1][1], strict=True):
        assert (mine.row, mine.rank, mine.token_ids) == (other.row, other.rank, other.token_ids)
