"""Copies of KV blocks on the device: in order, in all layers, to a host pool and back."""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.formats import noise
from tests.cuda.kernels.references import copy_blocks_reference

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks


def layers(where: torch.device, num_layers: int, num_blocks: int, head_dim: int = 8) -> list[torch.Tensor]:
    """KV of two heads in blocks of 16 tokens."""
    return [
        noise(num_blocks, 4, 16, head_dim, dtype=torch.bfloat16, where=where, seed=i)
        for i in range(num_layers)
    ]


def pairs_of(device: Device, *pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=device.torch_device).view(-1, 2)


@pytest.mark.parametrize("head_dim", [8, 136], ids=["under-a-block-of-threads", "past-two"])
@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 3)],
        [(0, 3), (0, 4), (1, 5)],
        [(0, 1), (1, 2), (2, 3)],
        [(2, 3), (1, 2), (0, 1)],
        [(0, 1), (2, 1), (1, 0)],
        [(4, 4)],
    ],
    ids=["one", "many", "chain", "shift", "overwritten", "itself"],
)
def test_copies_apply_in_order(device: Device, pairs: list[tuple[int, int]], head_dim: int) -> None:
    memory = layers(device.torch_device, 3, 6, head_dim)
    expected = [layer.clone() for layer in memory]
    copy_blocks_reference(expected, expected, pairs)
    pool = BlockPool.of(device, memory)
    copy_blocks(device, pool, pool, pairs_of(device, *pairs))
    for layer, right in zip(memory, expected, strict=True):
        assert torch.equal(layer, right)


def test_swap_out_and_in_to_other_blocks(device: Device) -> None:
    """The host pool has another number of blocks and thus other strides."""
    memory = layers(device.torch_device, 2, 6)
    before = [layer.clone() for layer in memory]
    host = [device.pinned((3, 4, 16, 8), torch.bfloat16).zero_() for _ in memory]
    on_device, on_host = BlockPool.of(device, memory), BlockPool.of(device, host)
    copy_blocks(device, on_device, on_host, pairs_of(device, (5, 0), (1, 2)))
    device.synchronize()
    for layer, kept in zip(before, host, strict=True):
        assert torch.equal(kept[0], layer[5].cpu())
        assert torch.equal(kept[2], layer[1].cpu())
        assert not kept[1].any()
    for layer in memory:
        layer.zero_()
    copy_blocks(device, on_host, on_device, pairs_of(device, (0, 2), (2, 3)))
    for layer, old in zip(memory, before, strict=True):
        assert torch.equal(layer[2], old[5])
        assert torch.equal(layer[3], old[1])
        assert not layer[[0, 1, 4, 5]].any()


def test_no_pairs(device: Device) -> None:
    memory = layers(device.torch_device, 1, 2)
    before = memory[0].clone()
    pool = BlockPool.of(device, memory)
    copy_blocks(device, pool, pool, pairs_of(device))
    assert torch.equal(memory[0], before)


def test_invalid_tensor_is_named(device: Device) -> None:
    where = device.torch_device
    memory = layers(where, 2, 4)
    with pytest.raises(ValueError, match="place 1: expected contiguous"):
        BlockPool.of(device, [memory[0], memory[1][:2]])
    with pytest.raises(ValueError, match="block size and address multiples of 16 bytes"):
        BlockPool.of(device, [torch.zeros((4, 1, 1, 3), device=where)])
    pool = BlockPool.of(device, memory)
    with pytest.raises(ValueError, match="target: expected 2 places"):
        copy_blocks(device, pool, BlockPool.of(device, memory[:1]), pairs_of(device, (0, 1)))
    with pytest.raises(ValueError, match="pairs: expected contiguous int32"):
        copy_blocks(device, pool, pool, pairs_of(device, (0, 1)).long())
