"""The compiled host kernels against the torch references, on shapes that straddle tiles.

Where the library was not built or the processor lacks AVX-512 BF16, the same functions run their torch fallbacks, and
the tests hold for those, except the one on identical bits, which only our own kernel promises.
"""

from __future__ import annotations

import pytest
import torch

from quintet.executor.ops.host_library import host_library
from quintet.executor.ops.linear import pack_linear
from quintet.executor.ops.linear_on_host import pack_linear_in_tiles


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 191, 192, 200])
@pytest.mark.parametrize(
    ("width", "depth"), [(1, 1), (64, 32), (63, 33), (65, 128), (200, 7), (70, 2047), (70, 2051)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(rows: int, width: int, depth: int, biased: bool) -> None:
    """fp32 sums of up to 2 051 products differ by some 1e-6 of their terms' size, then one rounding to bf16 (2^-8)."""
    weight, x = noise(width, depth), noise(rows, depth, seed=1)
    bias = noise(width, seed=2) if biased else None
    expected = pack_linear(weight.float(), None if bias is None else bias.float())(x.float())
    out = pack_linear_in_tiles(weight, bias)(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-4)


def test_linear_takes_rows_apart_and_refuses_other_widths() -> None:
    layer = pack_linear_in_tiles(noise(40, 24), None)
    x = noise(9, 48, seed=1)
    assert torch.equal(layer(x[:, 8:32]), layer(x[:, 8:32].contiguous()))
    assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))
    if host_library() is not None:
        with pytest.raises(ValueError, match=r"\[9, 48\].*num_tokens, 24"):
            layer(x)


@pytest.mark.parametrize("threads", [1, 2])
def test_linear_of_a_row_has_the_same_bits_in_every_batch(threads: int) -> None:
    if host_library() is None:
        return
    layer = pack_linear_in_tiles(noise(130, 2100), noise(130, seed=2))
    x = noise(400, 2100, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = layer(x)
        for begin, end in ((0, 1), (5, 12), (190, 195), (1, 400)):
            assert torch.equal(layer(x[begin:end]), whole[begin:end])
    finally:
        torch.set_num_threads(before)
