"""Kernels for draws and log-probabilities, against definitions and torch references, in every instruction set.

Sums of weights are rounded in another order, so a draw may differ from the reference at a border. `acceptable` returns the
correct tokens; the tests count how often there is exactly one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, plan_of
from tests.executor.kernels.instruction_sets import REPEATING, isa
from tests.executor.sampling.acceptable_draws import FILTERS, acceptable, positions_of, table

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.host_kernels import draw_on_host, entries_on_host
from quintet.executor.sampling.logprob_entries import entries
from quintet.executor.sampling.philox import uniform
from quintet.executor.sampling.settings import RECORD, Settings, settings_of
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def test_the_requested_instruction_set_is_used() -> None:
    assert isa() == os.environ.get(REPEATING, isa())


@pytest.fixture(autouse=True)
def kernels_on_one_thread() -> Iterator[None]:
    yield
    set_threads(1)


def set_threads(count: int) -> None:
    library = open_library()
    assert library is not None
    library.qt_set_threads(count, 0)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def host_draw(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    count = len(params)
    return draw_on_host(logits, table(params), np.arange(count), positions_of(count)).tolist()


def test_the_random_numbers_are_philox() -> None:
    """With equal weights, which have exact sums, the upper 12 bits of the number select the token."""
    count, size = 500, 4096
    slots = np.arange(count)
    settings = np.zeros(count, RECORD)
    settings["temperature"], settings["top_p"], settings["log_min_p"] = 1.0, 1.0, -np.inf
    settings["seed"] = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    positions = np.random.default_rng(1).integers(0, 2**62, count)
    drawn = draw_on_host(torch.zeros(count, size), settings, slots, positions)
    expected = np.floor(uniform(settings["seed"], positions) * size)
    np.testing.assert_array_equal(drawn.numpy(), expected)


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 3, 15, 16, 127, 128, 129, 1000, 5003])
def test_greedy_takes_the_lowest_of_equal_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (noise(60, vocab_size) * 3).round().to(dtype)  # many ties
    logits[1] = -logits[1].abs() - 1  # none positive
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    logits[3] = -torch.inf
    logits[4, vocab_size // 2 :] = torch.inf
    logits[5, vocab_size // 2] = logits[5, -1] = torch.nan
    logits[6] = torch.nan
    logits[7] = -torch.finfo(dtype).max
    zeros = np.zeros(60, RECORD)
    drawn = draw_on_host(logits, zeros, np.arange(60), positions_of(60))
    numbers = logits.float().nan_to_num(nan=torch.inf, posinf=3e38)
    lowest = [row.index(max(row)) for row in numbers.tolist()]
    assert drawn.tolist() == lowest
    rows = np.array([5, 5, 0, 17])
    assert draw_on_host(logits, zeros, rows, rows, rows).tolist() == [lowest[row] for row in rows]


@dtypes
@pytest.mark.parametrize("num_rows", [1, 3, 4, 14])
@pytest.mark.parametrize("vocab_size", [40, 5003, 20011, 151936])
def test_a_program_draws_the_same_on_any_number_of_threads(
    dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    """With few rows, threads search parts of a row."""
    logits = (noise(num_rows, vocab_size) * 4).to(dtype)
    params = [SamplingParams(**FILTERS[name]) for name in FILTERS][:num_rows]  # type: ignore[arg-type]
    params = params + [SamplingParams(temperature=0.0)] * (num_rows - len(params))
    params[0] = SamplingParams(temperature=0.0)
    for spoilt in (False, True):
        if spoilt:
            logits[::2, vocab_size // 3] = torch.nan
        slots = [5 * i % 16 for i in range(num_rows)]
        plan = plan_of([Drawer(each, prompt=[1] * (i + 1)) for i, each in enumerate(params)], slots)
        tables = SlotTables(16, 64, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
        tables.apply(plan)
        settings = table([SamplingParams()] * 16)
        settings[slots] = table(params)
        lengths = np.arange(num_rows) + 1
        expected = draw_on_host(logits, settings, np.array(slots), lengths).tolist()
        for threads in (1, 2, 3):
            set_threads(threads)
            step = program_draw(logits, plan, tables, settings)
            assert step.columns["drawn"][:num_rows].tolist() == expected
            assert tables.token_ids[slots, lengths].tolist() == expected
            tables.token_ids[slots, lengths] = -1


def program_draw(logits: torch.Tensor, plan: StepPlan, tables: SlotTables, settings: Settings) -> Step:
    """Run a program that only draws."""
    library = program_library()
    assert library is not None
    program = library.new()
    library.draw(program, logits.data_ptr(), logits.stride(0), FLOAT_CODES[logits.dtype], logits.shape[1])
    step = Step(library, 64, 16)
    step.fill(Rows(plan), tables, settings)
    library.run(program, step.address, 0, library.size(program))
    library.delete(program)
    return step


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 5, 130, 2000, 20011])
@pytest.mark.parametrize("scale", [0.05, 2.0, 12.0])
def test_draws_follow_the_definition(dtype: torch.dtype, vocab_size: int, scale: float) -> None:
    count = 2 * len(FILTERS)
    params = [SamplingParams(**FILTERS[name]) for name in FILTERS] * 2  # type: ignore[arg-type]
    logits = (noise(count, vocab_size, seed=vocab_size) * scale).to(dtype)
    logits[len(FILTERS) :, 1::3] = -torch.inf
    settings = table(params)
    uniforms = torch.from_numpy(uniform(settings["seed"], positions_of(count)))
    right = acceptable(logits, settings, uniforms)
    before = logits.clone()
    for function in (draw_on_host, draw):
        drawn = function(logits, settings, np.arange(count), positions_of(count)).tolist()
        for token, tokens, each in zip(drawn, right, params, strict=True):
            assert token in tokens, each
    assert torch.equal(logits, before)
    # among 20 011 nearly equal tokens two in five random numbers are that close to a border
    assert sum(len(tokens) == 1 for tokens in right) >= 0.7 * count


def possible_tokens(logits: torch.Tensor, params: SamplingParams, draws: int = 3000) -> set[int]:
    """Return the tokens that many draws of one row give; for rows of few, similarly likely tokens."""
    settings = np.array([settings_of(params, 5)] * draws, RECORD)
    rows = np.zeros(draws, np.int64)
    return set(draw_on_host(logits[None], settings, np.arange(draws), np.arange(draws), rows).tolist())


@dtypes
def test_ties_with_the_last_kept_token_are_kept(dtype: torch.dtype) -> None:
    logits = torch.full((300,), -9.0, dtype=dtype)
    logits[[7, 200]] = 2.0
    logits[[3, 150, 151, 299]] = 1.0
    logits[[4, 5, 6]] = 0.5
    two, four, three = {7, 200}, {3, 150, 151, 299}, {4, 5, 6}
    assert possible_tokens(logits, SamplingParams(top_k=1)) == two
    assert possible_tokens(logits, SamplingParams(top_k=2)) == two
    assert possible_tokens(logits, SamplingParams(top_k=3)) == two | four
    assert possible_tokens(logits, SamplingParams(top_k=7)) == two | four | three
    # of the 9, the two weigh 0.49, the six 0.86
    assert possible_tokens(logits, SamplingParams(top_k=7, top_p=0.5)) == two | four
    assert possible_tokens(logits, SamplingParams(top_p=0.4)) == two
    assert (
        possible_tokens(logits, SamplingParams(min_p=0.3)) == two | four
    )  # e^-1 is more than 0.3, e^-1.5 less
    zeros = torch.tensor([0.0, -0.0, 0.0, -5.0], dtype=dtype)
    assert possible_tokens(zeros, SamplingParams(top_k=1)) == {0, 1, 2}
    assert possible_tokens(zeros, SamplingParams(top_p=0.1)) == {0, 1, 2}


def test_logits_with_equal_quotients_are_ties() -> None:
    """Adjacent fp32 numbers with equal rounded quotients are both possible_tokens, as in the reference, which divides first."""
    second = torch.tensor(3.9)
    first = torch.nextafter(second, torch.tensor(4.0))
    if first / 1.9 != second / 1.9:  # then the next two are equal: their quotients are half a unit apart
        first, second = torch.nextafter(first, torch.tensor(4.0)), first
    logits = torch.stack((first, second, torch.tensor(1.0)))
    assert first > second
    assert first / 1.9 == second / 1.9
    assert possible_tokens(logits, SamplingParams(temperature=1.9, top_k=1)) == {0, 1}
    assert possible_tokens(logits, SamplingParams(temperature=1.9, top_p=0.1)) == {0, 1}
    assert possible_tokens(logits, SamplingParams(temperature=1.9, min_p=1.0)) == {0, 1}
    assert possible_tokens(logits, SamplingParams(temperature=1.0, top_k=1)) == {0}


@dtypes
def test_rows_without_a_distribution_draw_token_0(dtype: torch.dtype) -> None:
    logits = noise(5, 300).to(dtype)
    logits[0] = -torch.inf
    logits[1, 200] = torch.nan
    logits[2, 200] = torch.inf
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[4, 200] = -3.0
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 20, "top_p": 0.9}):
        params = [SamplingParams(**filters)] * 5  # type: ignore[arg-type]
        expected = [0, 0, 0, 0, 200]
        assert host_draw(logits, params) == expected
        assert draw(logits, table(params), np.arange(5), positions_of(5)).tolist() == expected


@pytest.mark.parametrize("value", [1e-39, -1e-39, 0.0, -3e38])
def test_equal_logits_are_equally_likely(value: float) -> None:
    """Also denormals, which some instructions flush to zero; wide enough for every path of the kernel."""
    logits = torch.full((2, 6000), value, dtype=torch.bfloat16)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0, "top_p": 0.5}):
        params = [SamplingParams(**filters)] * 2  # type: ignore[arg-type]
        numbers = uniform(table(params)["seed"], positions_of(2))
        assert host_draw(logits, params) == np.floor(numbers * 6000).tolist()


def test_a_row_has_the_same_token_in_every_batch_and_on_any_number_of_threads() -> None:
    """Also at borders: one row drawn 40 times among others, with settings that cover every path of the kernel."""
    params = [SamplingParams(**each) for each in FILTERS.values()]  # type: ignore[arg-type]
    params.append(SamplingParams(temperature=0.0))
    wide = noise(len(params), 2 * 9000, seed=3).bfloat16()
    logits = wide[:, 100:9100]
    together = host_draw(logits, params)
    settings, slots = table(params), np.arange(len(params))
    for threads in (1, 2):
        set_threads(threads)
        assert host_draw(logits.contiguous(), params) == together
        backwards = np.ascontiguousarray(slots[::-1])
        positions = np.ascontiguousarray(positions_of(len(params))[::-1])
        assert draw_on_host(logits, settings, backwards, positions, backwards).tolist() == together[::-1]
        alone = [
            int(draw_on_host(logits[i : i + 1], settings, slots[i : i + 1], positions_of(i + 1)[i:]))
            for i in range(len(params))
        ]
        assert alone == together


def test_other_layouts_are_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous elements"):
        host_draw(noise(8, 4).t(), [SamplingParams()] * 4)
    with pytest.raises(ValueError, match="float64"):
        host_draw(noise(4, 8).double(), [SamplingParams()] * 4)


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 16, 129, 5003])
@pytest.mark.parametrize("num_top", [0, 1, 20, 700])
def test_logprob_entries(dtype: torch.dtype, vocab_size: int, num_top: int) -> None:
    """Values are sums of two numbers up to 20: the error is the last bit of each, 2^-19."""
    num_top = min(num_top, vocab_size)
    logits = (noise(9, vocab_size) * 4).to(dtype)
    logits[0, ::2] = -torch.inf
    logits[1] = 1.0
    logits[2] -= 300.0
    own = torch.arange(9, dtype=torch.int32) * 31 % vocab_size
    found, expected = entries_on_host(logits, own, num_top), entries(logits, own, num_top)
    assert found.ids[:, 0].tolist() == own.tolist()
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(found.normalizers, expected.normalizers, rtol=1e-6, atol=4e-6)
    for row in range(9):
        wide = logits[row].float()
        assert found.ranks[row] == 1 + int((wide > wide[own[row]]).sum())
        largest_first = sorted(range(vocab_size), key=lambda token, wide=wide: (-float(wide[token]), token))
        assert found.ids[row, 1:].tolist() == largest_first[:num_top]
    some = np.array([8, 2, 2])
    again = entries_on_host(logits, own[some], num_top, some)
    np.testing.assert_array_equal(again.values, found.values[some])
    np.testing.assert_array_equal(again.ids, found.ids[some])


def test_logprobs_of_a_row_without_a_distribution_are_nan() -> None:
    logits = noise(3, 200)
    logits[0, 100] = torch.nan
    logits[1] = -torch.inf
    found = entries_on_host(logits, torch.tensor([5, 6, 7]), 4)
    assert np.isnan(found.values[:2]).all()
    assert np.isfinite(found.values[2]).all()
    assert found.ids[0].tolist() == [5, 0, 1, 2, 3]
