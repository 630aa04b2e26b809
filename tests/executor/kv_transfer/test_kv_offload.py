"""KV blocks in host memory: copies are exact for every format and order of dimensions."""

from __future__ import annotations

import pytest
import torch

from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.wire.codec import pack_i32

SHAPE = (2, 5, 3, 4, 8)
"""Key and value plane, blocks, heads, tokens, numbers per head."""


def layers_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return two layers in the eager runner's view: blocks are dimension 0 but second in memory."""
    noise = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    return [layer.to(dtype).transpose(0, 1) for layer in noise]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_block_is_swapped_in_unchanged(dtype: torch.dtype) -> None:
    layers = layers_of(dtype)
    before = [layer.clone() for layer in layers]
    host = HostBlocks(layers, 3)
    host.copy_out(pack_i32([1, 2, 4, 0]))
    for layer in layers:
        layer[1] = layer[0]
        layer[4] = layer[0]
    host.copy_in(pack_i32([0, 2, 4, 0, 2, 2]))
    for layer, was in zip(layers, before, strict=True):
        for block, content in enumerate([1, 0, 1, 3, 4]):
            assert same(layer[block], was[content]), block


def test_measuring_changes_nothing() -> None:
    layers = layers_of(torch.bfloat16)
    before = [layer.clone() for layer in layers]
    assert HostBlocks(layers, 3).measure() > 0
    assert all(same(layer, was) for layer, was in zip(layers, before, strict=True))


def test_without_host_blocks_nothing_is_measured() -> None:
    assert HostBlocks(layers_of(torch.float32), 0).measure() == 0
