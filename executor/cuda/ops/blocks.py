"""Copies of KV blocks on the device, in all layers with one launch: within its memory, or to and from a host pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.cuda.device import Device, Kernel
from quintet.executor.cuda.ops.formats import PACK_BYTES

COPY_BLOCKS = Kernel("blocks", "copy_blocks", "plplpil")
THREADS = 256


@dataclass(frozen=True, slots=True)
class BlockPool:
    """KV blocks of all layers in one kind of memory: the device's, or page-locked host memory."""

    layers: tuple[torch.Tensor, ...]
    """Of each layer ``[2, num_blocks, ...]``, the same shape."""
    addresses: torch.Tensor
    """int64[num_layers] on the device: where each layer begins."""
    num_blocks: int
    plane_bytes: int
    """Of all keys, or all values, of a layer."""
    block_bytes: int
    """Of one block's keys, or values, in a layer."""

    @classmethod
    def of(cls, device: Device, layers: Sequence[torch.Tensor]) -> BlockPool:
        """Return the pool of these layers, on the device or made by `Device.pinned`. Not for use while capturing."""
        first = layers[0]
        num_blocks = first.shape[1]
        plane_bytes = first[0].numel() * first.element_size()
        block_bytes = plane_bytes // max(1, num_blocks)
        for index, layer in enumerate(layers):
            if layer.shape != first.shape or layer.dtype != first.dtype or not layer.is_contiguous():
                raise ValueError(
                    f"layer {index}: expected contiguous {first.dtype}{list(first.shape)} as layer 0 is, got"
                    f" {layer.dtype}{list(layer.shape)} with strides {layer.stride()}"
                )
            if layer.shape[0] != 2 or layer.data_ptr() % PACK_BYTES or block_bytes % PACK_BYTES:
                raise ValueError(
                    f"layer {index}: expected [2, blocks, ...] with blocks of multiples of {PACK_BYTES} bytes at"
                    f" multiples of {PACK_BYTES} bytes, got {list(layer.shape)} with blocks of {block_bytes} bytes"
                )
        addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64)
        return cls(tuple(layers), addresses.to(device.torch_device), num_blocks, plane_bytes, block_bytes)


def copy_blocks_reference(
    source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy block after block, in order."""
    for old, new in pairs:
        for from_layer, to_layer in zip(source, target, strict=True):
            to_layer[:, new] = from_layer[:, old]


def copy_blocks(device: Device, source: BlockPool, target: BlockPool, pairs: torch.Tensor) -> None:
    """Copy contents of blocks from ``source`` to ``target``, which may be one pool, as if pair after pair.

    pairs: int32[num_pairs, 2] on the device, block of ``source`` and block of ``target``. They are not read here:
    whoever packs a plan checks that such blocks exist. The core plans no chains within a step (a copy's target is a block
    that nobody had); were there one, in order is what it gets.
    """
    if source.block_bytes != target.block_bytes or len(source.layers) != len(target.layers):
        raise ValueError(
            f"target: expected {len(source.layers)} layers with blocks of {source.block_bytes} bytes, as the source"
            f" has; got {len(target.layers)} with {target.block_bytes}"
        )
    if pairs.dtype != torch.int32 or pairs.ndim != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"pairs: expected contiguous int32[n, 2], got {pairs.dtype}{list(pairs.shape)}")
    if not len(pairs):
        return
    device.launch(
        COPY_BLOCKS,
        (-(-source.block_bytes // (PACK_BYTES * THREADS)), 2 * len(source.layers), 1),
        (THREADS, 1, 1),
        (
            *(source.addresses, source.plane_bytes, target.addresses, target.plane_bytes),
            *(pairs, len(pairs), source.block_bytes),
        ),
    )
