"""Log-probabilities on the device, against the reference and plain sorting."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.entries import MAX_TOP, entries_on_device
from quintet.executor.backends.cuda.ops.entries import entries as device_entries
from quintet.executor.sampling.logprob_entries import entries

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@dtypes
@pytest.mark.parametrize("vocab_size", [1, 50, 256, 4099])
@pytest.mark.parametrize("num_top", [0, 1, 20, MAX_TOP])
def test_entries(device: Device, dtype: torch.dtype, vocab_size: int, num_top: int) -> None:
    """Values are sums of two numbers of size up to 20: their last bits, 2^-19 each."""
    num_top = min(num_top, vocab_size)
    logits = (noise(6, vocab_size) * 4).to(dtype)
    logits[0, ::2] = -torch.inf
    logits[1] = 1.0
    logits[2] -= 300.0
    logits[3] = logits[3].round()  # ties, and both zeros
    own = torch.arange(6, dtype=torch.int32) * 31 % vocab_size
    report = partial(entries_on_device, device)
    there, requested = logits.to(device.torch_device), own.to(device.torch_device)
    found, expected = report(there, requested, num_top), entries(logits, own, num_top)
    assert found.ids[:, 0].tolist() == own.tolist()
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(found.normalizers, expected.normalizers, rtol=1e-6, atol=4e-6)
    for row in range(6):
        wide = logits[row].float()
        assert found.ranks[row] == 1 + int((wide > wide[own[row]]).sum())
        largest_first = sorted(range(vocab_size), key=lambda token, wide=wide: (-float(wide[token]), token))
        assert found.ids[row, 1:].tolist() == largest_first[:num_top]
    some = np.array([5, 2, 2])
    again = report(there, requested[torch.from_numpy(some).to(requested.device)], num_top, some)
    np.testing.assert_array_equal(again.values, found.values[some])
    np.testing.assert_array_equal(again.ids, found.ids[some])


def test_wide_vocabulary_with_many_equal_logits(device: Device) -> None:
    logits = (noise(2, 32_000) * 2).round().bfloat16().to(device.torch_device)
    own = torch.tensor([31_999, 4], dtype=torch.int32, device=device.torch_device)
    found = entries_on_device(device, logits, own, 30)
    for row in range(2):
        order = logits[row].float().cpu().sort(descending=True, stable=True).indices
        assert found.ids[row, 1:].tolist() == order[:30].tolist()


def test_entries_of_a_row_without_a_distribution_are_nan(device: Device) -> None:
    logits = noise(4, 200)
    logits[0, 100] = torch.nan
    logits[1] = -torch.inf
    logits[3, 5] = torch.inf
    own = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=device.torch_device)
    found = entries_on_device(device, logits.to(device.torch_device), own, 4)
    assert np.isnan(found.values[[0, 1, 3]]).all()
    assert np.isnan(found.normalizers[[0, 1, 3]]).all()
    assert np.isfinite(found.values[2]).all()
    assert found.ids[0].tolist() == [5, 0, 1, 2, 3]
    assert found.ranks[[0, 1, 3]].tolist() == [1, 1, 1]


def test_more_entries_than_the_kernel_supports_use_torch(device: Device) -> None:
    logits = noise(2, 300).to(device.torch_device)
    own = torch.tensor([5, 6], dtype=torch.int32, device=device.torch_device)
    found, expected = entries_on_device(device, logits, own, 300), entries(logits, own, 300)
    np.testing.assert_array_equal(found.ids, expected.ids)
    with pytest.raises(ValueError, match="num_top is 65"):
        device_entries(device, logits, own, 65)
