"""Copies of KV blocks on the device, all places of a block with one launch: within its memory, or to and from a host pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES

COPY_BLOCKS = Kernel("blocks", "copy_blocks", "pppil")
THREADS = 256


@dataclass(frozen=True, slots=True)
class BlockPool:
    """KV blocks in one kind of memory: the device's, or page-locked host memory."""

    places: tuple[torch.Tensor, ...]
    """Of each place of a block ``[num_blocks, ...]``, the same shape."""
    addresses: torch.Tensor
    """int64[num_places] on the device: where each begins."""
    num_blocks: int
    block_bytes: int
    """Of one block at a place."""

    @classmethod
    def of(cls, device: Device, places: Sequence[torch.Tensor]) -> BlockPool:
        """Return the pool of these places, on the device or made by `Device.pinned`. Not for use while capturing."""
        first = places[0]
        num_blocks = first.shape[0]
        block_bytes = first.numel() * first.element_size() // max(1, num_blocks)
        for index, place in enumerate(places):
            if place.shape != first.shape or place.dtype != first.dtype or not place.is_contiguous():
                raise ValueError(
                    f"place {index}: expected contiguous {first.dtype}{list(first.shape)} as place 0 is, got"
                    f" {place.dtype}{list(place.shape)} with strides {place.stride()}"
                )
            if place.data_ptr() % PACK_BYTES or block_bytes % PACK_BYTES:
                raise ValueError(
                    f"place {index}: expected [blocks, ...] with blocks of multiples of {PACK_BYTES} bytes at"
                    f" multiples of {PACK_BYTES} bytes, got {list(place.shape)} with blocks of {block_bytes} bytes"
                )
        addresses = torch.tensor([place.data_ptr() for place in places], dtype=torch.int64)
        return cls(tuple(places), addresses.to(device.torch_device), num_blocks, block_bytes)


def copy_blocks_reference(
    source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy block after block, in order."""
    for old, new in pairs:
        for from_place, to_place in zip(source, target, strict=True):
            to_place[new] = from_place[old]


def copy_blocks(device: Device, source: BlockPool, target: BlockPool, pairs: torch.Tensor) -> None:
    """Copy contents of blocks from ``source`` to ``target``, which may be one pool, as if pair after pair.

    pairs: int32[num_pairs, 2] on the device, block of ``source`` and block of ``target``. They are not read here:
    whoever packs a plan checks that such blocks exist. The core plans no chains within a step (a copy's target is a block
    that nobody had); were there one, in order is what it gets.
    """
    if source.block_bytes != target.block_bytes or len(source.places) != len(target.places):
        raise ValueError(
            f"target: expected {len(source.places)} places with blocks of {source.block_bytes} bytes, as the source"
            f" has; got {len(target.places)} with {target.block_bytes}"
        )
    if pairs.dtype != torch.int32 or pairs.ndim != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"pairs: expected contiguous int32[n, 2], got {pairs.dtype}{list(pairs.shape)}")
    if not len(pairs):
        return
    device.launch(
        COPY_BLOCKS,
        (-(-source.block_bytes // (PACK_BYTES * THREADS)), len(source.places), 1),
        (THREADS, 1, 1),
        (*(source.addresses, target.addresses, pairs, len(pairs), source.block_bytes),),
    )
