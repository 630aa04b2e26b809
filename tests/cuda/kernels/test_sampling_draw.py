"""Sampling on the device: against the definition in fp64, the reference, and other batches and grids.

A token may differ from the reference's only where `acceptable` finds a threshold within rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.executor.sampling.acceptable_draws import FILTERS, acceptable, positions_of, table

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.draw import draw, draw_on_device
from quintet.executor.backends.cuda.ops.logit_tiles import SCAN_TILES, num_tiles
from quintet.executor.sampling.draw import draw as reference
from quintet.executor.sampling.philox import uniform
from quintet.executor.sampling.settings import RECORD, Settings, settings_of
from quintet.wire.params import SamplingParams

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device.torch_device)


def column(device: Device, values: object) -> torch.Tensor:
    return on(device, torch.from_numpy(np.array(values, np.int32)))


def records(device: Device, settings: Settings) -> torch.Tensor:
    return on(device, torch.from_numpy(settings.view(np.uint8).reshape(len(settings), -1).copy()))


def drawn(
    device: Device, logits: torch.Tensor, settings: Settings, rows: list[int] | None = None
) -> list[int]:
    """Draw through the sampler's public function, for slot i at position 11 + i."""
    count = len(settings)
    index = None if rows is None else np.array(rows)
    tokens = draw_on_device(
        device, on(device, logits), settings, np.arange(count), positions_of(count), index
    )
    assert tokens.dtype == torch.int32
    return [int(token) for token in tokens.cpu()]


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 50, 256, 1000, 4099])
def test_greedy_takes_the_lowest_of_equal_logits(device: Device, dtype: torch.dtype, vocab_size: int) -> None:
    logits = (noise(16, vocab_size) * 3).round().to(dtype)  # many ties
    logits[1] = -logits[1].abs() - 1  # none positive
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    logits[3] = -torch.inf
    logits[4, vocab_size // 2 :] = torch.inf
    logits[5, vocab_size // 2] = logits[5, -1] = torch.nan
    logits[6] = torch.nan
    logits[7] = -torch.finfo(dtype).max
    logits[8], logits[8, -1] = -torch.inf, -5.0
    zeros = np.zeros(16, RECORD)
    numbers = logits.float().nan_to_num(nan=torch.inf, posinf=3e38)
    lowest = [row.index(max(row)) for row in numbers.tolist()]
    assert drawn(device, logits, zeros) == lowest
    assert drawn(device, logits, zeros[:4], [5, 5, 0, 15]) == [lowest[row] for row in (5, 5, 0, 15)]


def test_random_numbers_are_philox(device: Device) -> None:
    """From equal weights with exact sums, the upper 12 bits of the random number choose."""
    count, size = 60, 4096
    settings = np.zeros(count, RECORD)
    settings["temperature"], settings["top_p"], settings["log_min_p"] = 1.0, 1.0, -np.inf
    settings["seed"] = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    expected = np.floor(uniform(settings["seed"], positions_of(count)) * size)
    assert drawn(device, torch.zeros(1, size), settings, [0] * count) == expected.tolist()


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 50, 1000, 4099])
@pytest.mark.parametrize("scale", [0.05, 4.0])
def test_draws_equal_the_definition(
    device: Device, dtype: torch.dtype, vocab_size: int, scale: float
) -> None:
    """Every filter; a third of the tokens is impossible in every second row."""
    params = [SamplingParams(**each) for each in FILTERS.values()]  # type: ignore[arg-type]
    count = len(params)
    logits = (noise(count, vocab_size, seed=vocab_size) * scale).to(dtype)
    logits[::2, 1::3] = -torch.inf
    settings = table(params)
    right = acceptable(logits, settings, torch.from_numpy(uniform(settings["seed"], positions_of(count))))
    before = logits.clone()
    tokens = drawn(device, logits, settings)
    expected = reference(logits, settings, np.arange(count), positions_of(count)).tolist()
    for token, other, allowed, each in zip(tokens, expected, right, params, strict=True):
        assert token in allowed, each
        assert token == other or len(allowed) > 1, each
    assert torch.equal(logits, before)
    # of 4 099 nearly equal tokens, one in ten random numbers is that close to a threshold
    assert sum(len(allowed) == 1 for allowed in right) >= 0.7 * count


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_wide_vocabulary(device: Device, scale: float) -> None:
    """More tiles than the first attempt for top-p: they hold its share of a steep row, but not of a flat one."""
    params = [SamplingParams(**FILTERS[name]) for name in FILTERS if name not in ("cold", "one")]  # type: ignore[arg-type]
    params.append(SamplingParams(top_p=0.3))
    count = len(params)
    logits = (noise(count, 32_000, seed=5) * scale).bfloat16()
    settings = table(params)
    right = acceptable(logits, settings, torch.from_numpy(uniform(settings["seed"], positions_of(count))))
    for token, allowed, each in zip(drawn(device, logits, settings), right, params, strict=True):
        assert token in allowed, each


@pytest.mark.parametrize("name", ["plain", "top-k", "top-p", "all"])
def test_many_seeds_equal_the_reference(device: Device, name: str) -> None:
    """One row of 50 tokens: thresholds lie far apart, and random numbers near one are rare."""
    count = 100
    logits = noise(1, 50, seed=8) * 2
    params = SamplingParams(**FILTERS[name])  # type: ignore[arg-type]
    settings = np.array([settings_of(params, 7919 * i + 3) for i in range(count)], RECORD)
    rows = np.zeros(count, np.int64)
    expected = reference(logits, settings, np.arange(count), positions_of(count), rows).tolist()
    numbers = torch.from_numpy(uniform(settings["seed"], positions_of(count)))
    right = acceptable(logits.expand(count, -1), settings, numbers)
    tokens = drawn(device, logits, settings, [0] * count)
    differing = [i for i in range(count) if tokens[i] != expected[i]]
    assert all(tokens[i] in right[i] and len(right[i]) > 1 for i in differing)
    assert sum(len(allowed) == 1 for allowed in right) >= 0.98 * count
    assert len(set(tokens)) > 3


def kept(device: Device, logits: torch.Tensor, **settings: float) -> set[int]:
    """Return the tokens that one row of few, similarly likely tokens gives for 60 random numbers spread over (0, 1)."""
    candidates = np.arange(4000, dtype=np.uint64)
    numbers = uniform(candidates, np.full(4000, 11))
    seeds = candidates[np.argsort(numbers)[33::66]]
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    mine = np.array([settings_of(params, int(seed)) for seed in seeds], RECORD)
    count = len(mine)
    tokens = draw_on_device(
        device,
        on(device, logits[None]),
        mine,
        np.arange(count),
        np.full(count, 11),
        np.zeros(count, np.int64),
    )
    return set(tokens.tolist())


@pytest.mark.drawn(1)
@dtypes
def test_logits_equal_to_the_last_kept_one_are_kept(device: Device, dtype: torch.dtype) -> None:
    logits = torch.full((300,), -9.0, dtype=dtype)
    logits[[7, 200]] = 2.0
    logits[[3, 150, 151, 299]] = 1.0
    logits[[4, 5, 6]] = 0.5
    two, four, three = {7, 200}, {3, 150, 151, 299}, {4, 5, 6}
    assert kept(device, logits, top_k=1) == two
    assert kept(device, logits, top_k=3) == two | four
    assert kept(device, logits, top_k=7) == two | four | three
    # of the 9, the two weigh 0.49, the six 0.86
    assert kept(device, logits, top_k=7, top_p=0.5) == two | four
    assert kept(device, logits, top_p=0.4) == two
    assert kept(device, logits, min_p=0.3) == two | four  # e^-1 is more than 0.3, e^-1.5 less
    zeros = torch.tensor([0.0, -0.0, 0.0, -5.0], dtype=dtype)
    assert kept(device, zeros, top_k=1) == {0, 1, 2}
    assert kept(device, zeros, top_p=0.1) == {0, 1, 2}


def test_logits_equal_after_division_are_kept(device: Device) -> None:
    """Adjacent fp32 logits with equal rounded quotients are both kept, as in the reference, which divides first."""
    second = torch.tensor(3.9)
    first = torch.nextafter(second, torch.tensor(4.0))
    if first / 1.9 != second / 1.9:  # then the next two: their quotients lie half a unit apart
        first, second = torch.nextafter(first, torch.tensor(4.0)), first
    logits = torch.stack((first, second, torch.tensor(1.0)))
    assert first > second
    assert first / 1.9 == second / 1.9
    assert kept(device, logits, temperature=1.9, top_k=1) == {0, 1}
    assert kept(device, logits, temperature=1.9, top_p=0.1) == {0, 1}
    assert kept(device, logits, temperature=1.9, min_p=1.0) == {0, 1}
    assert kept(device, logits, temperature=1.0, top_k=1) == {0}


@dtypes
def test_rows_without_a_distribution_draw_token_0(device: Device, dtype: torch.dtype) -> None:
    logits = noise(5, 300).to(dtype)
    logits[0] = -torch.inf
    logits[1, 200] = torch.nan
    logits[2, 200] = torch.inf
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[4, 200] = -3.0
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 20, "top_p": 0.9}):
        params = [SamplingParams(**filters)] * 5  # type: ignore[arg-type]
        assert drawn(device, logits, table(params)) == [0, 0, 0, 0, 200]


@pytest.mark.parametrize("value", [1e-39, -1e-39, 0.0, -3e38])
def test_equal_logits_are_equally_likely(device: Device, value: float) -> None:
    """Also denormals, which some instructions flush to zero."""
    logits = torch.full((2, 6000), value, dtype=torch.bfloat16)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0, "top_p": 0.5}):
        params = [SamplingParams(**filters)] * 2  # type: ignore[arg-type]
        numbers = uniform(table(params)["seed"], positions_of(2))
        assert drawn(device, logits, table(params)) == np.floor(numbers * 6000).tolist()


def test_limits_that_keep_all_or_almost_none(device: Device) -> None:
    logits = noise(1, 1000, seed=2).half()
    best = int(logits.float().argmax())
    plain = drawn(device, logits, table([SamplingParams()]))
    for nothing in ({"top_k": 1000}, {"top_k": 5000}, {"min_p": 1e-30}, {"top_p": 1.0}):
        assert drawn(device, logits, table([SamplingParams(**nothing)])) == plain  # type: ignore[arg-type]
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.01, "top_k": 1000}):
        assert drawn(device, logits, table([SamplingParams(**one)])) == [best]  # type: ignore[arg-type]


def test_token_of_a_row_does_not_depend_on_the_batch(device: Device) -> None:
    """Settings for every branch of the kernel; rows at odd addresses; padding in between."""
    params = [SamplingParams(**each) for each in FILTERS.values()]  # type: ignore[arg-type]
    params.append(SamplingParams(temperature=0.0))
    count = len(params)
    wide = on(device, noise(count, 2 * 2500, seed=3).bfloat16())
    logits = wide[:, 101:2600]
    settings = records(device, table(params))
    slots, positions = column(device, np.arange(count)), column(device, positions_of(count))
    together = draw(device, logits, settings, slots, positions)
    aligned = draw(device, logits.contiguous(), settings, slots, positions)
    assert torch.equal(aligned, together)

    order = column(device, np.stack((np.arange(count)[::-1], np.full(count, -1))).T.ravel())
    out = torch.full_like(order, -7)
    rows = order.clamp(min=0)
    result = draw(device, logits, settings, order, rows + 11, out=out, rows=rows)
    assert result is out
    assert torch.equal(out[::2].flip(0), together)
    assert (out[1::2] == -7).all()
    for i in range(0, count, 3):
        one = slice(i, i + 1)
        assert torch.equal(draw(device, logits[one], settings, slots[one], positions[one]), together[one])


@dtypes
def test_tile_sums_do_not_depend_on_the_grid(device: Device, dtype: torch.dtype) -> None:
    """One to five blocks a row; NaN makes the maximum of its tile NaN, and sums are of e^(x - maximum)."""
    logits = (noise(2, 4999) * 3).to(dtype)
    logits[1, 700] = torch.nan
    found = []
    for num_blocks in (1, 2, 5):
        found_tiles = torch.empty((2, 2, num_tiles(4999)), device=device.torch_device)
        device.launch(
            SCAN_TILES[dtype],
            (num_blocks, 2, 1),
            (256, 1, 1),
            (on(device, logits), 4999, 4999, None, None, None, 1.0, *found_tiles),
        )
        found.append(found_tiles.cpu())
    for other in found[1:]:
        assert torch.equal(other.view(torch.int32), found[0].view(torch.int32))
    padded = torch.full((2, num_tiles(4999) * 256), -torch.inf)
    padded[:, :4999] = logits.float()
    tiles = padded.view(2, -1, 256)
    torch.testing.assert_close(found[0][0], tiles.amax(-1), rtol=0, atol=0, equal_nan=True)
    sums = (tiles[0].double() - tiles[0].amax(-1, keepdim=True).double()).exp().sum(-1)
    # 13 additions of fp32 in a row, and an exponential of 2 units
    torch.testing.assert_close(found[0][1, 0].double(), sums, rtol=2e-6, atol=0)


def test_other_layouts_are_rejected(device: Device) -> None:
    logits, positions = on(device, noise(4, 8)), column(device, [1, 2, 3, 4])
    settings = records(device, table([SamplingParams()] * 4))
    with pytest.raises(ValueError, match="contiguous rows"):
        draw(device, logits.t()[:4], None, None, positions)
    with pytest.raises(ValueError, match="float64"):
        draw(device, logits.double(), None, None, positions)
    with pytest.raises(ValueError, match=r"positions is torch\.int64\[4\]"):
        draw(device, logits, None, None, positions.long())
    with pytest.raises(ValueError, match=r"slots is torch\.int32\[3\]"):
        draw(device, logits, settings, positions[:3], positions)
    with pytest.raises(ValueError, match="records of 32 bytes"):
        draw(device, logits, settings[:, :24].contiguous(), None, positions)
    with pytest.raises(ValueError, match="3 records for 4 rows"):
        draw(device, logits, settings[:3], None, positions)
    with pytest.raises(ValueError, match="expected at most 4"):
        draw(device, logits, None, None, column(device, [1] * 5))
