"""Copies of KV blocks, all layers in one launch: within device memory, or to and from a host pool."""

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
    """KV blocks in device memory or in pinned host memory."""

    places: tuple[torch.Tensor, ...]
    """One tensor ``[num_blocks, ...]`` per place of a block, of equal shapes."""
    addresses: torch.Tensor
    """int64[num_places] on the device: address of each place."""
    num_blocks: int
    block_bytes: int
    """Bytes of one block at one place."""

    @classmethod
    def of(cls, device: Device, places: Sequence[torch.Tensor]) -> BlockPool:
        """Return the pool of places on the device or allocated by `Device.pinned`. Must not be called during capture."""
        first = places[0]
        num_blocks = first.shape[0]
        block_bytes = first.numel() * first.element_size() // max(1, num_blocks)
        for index, place in enumerate(places):
            if place.shape != first.shape or place.dtype != first.dtype or not place.is_contiguous():
                raise ValueError(
                    f"place {index}: expected contiguous {first.dtype}{list(first.shape)} like place 0, got"
                    f" {place.dtype}{list(place.shape)} with strides {place.stride()}"
                )
            if place.data_ptr() % PACK_BYTES or block_bytes % PACK_BYTES:
                raise ValueError(
                    f"place {index}: expected [blocks, ...] with block size and address multiples of {PACK_BYTES} bytes,"
                    f" got {list(place.shape)} with blocks of {block_bytes} bytes"
                )
        addresses = torch.tensor([place.data_ptr() for place in places], dtype=torch.int64)
        return cls(tuple(places), addresses.to(device.torch_device), num_blocks, block_bytes)


def copy_blocks(device: Device, source: BlockPool, target: BlockPool, pairs: torch.Tensor) -> None:
    """Copy blocks from ``source`` to ``target``, which may be the same pool, as if pair by pair in order.

    pairs: int32[num_pairs, 2] on the device, block of ``source`` and block of ``target``. The host does not read them; the packer
    of the plan checks the block ids.
    """
    if source.block_bytes != target.block_bytes or len(source.places) != len(target.places):
        raise ValueError(
            f"target: expected {len(source.places)} places with blocks of {source.block_bytes} bytes like the source,"
            f" got {len(target.places)} with {target.block_bytes}"
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
