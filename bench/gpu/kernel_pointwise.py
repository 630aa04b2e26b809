"""Cases of `bench.gpu.kernels` that bandwidth limits: norms, activations, RoPE with the KV write, block copies.

Sizes are those of a Llama-3-8B layer in bf16: 32 query heads and 8 KV heads of 128, hidden size 4,096, intermediate size 14,336.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.kernel_rows import blocks_for, step_rows
from bench.gpu.kernels import Case, num_calls
from bench.gpu.shapes import BLOCK_SIZE
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.activation import Gate, gated
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.executor.backends.cuda.ops.norm import add_rms_norm, rms_norm
from quintet.executor.backends.cuda.ops.rope_kv import rope_kv

BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS = 32


def cases(device: Device, toy: bool) -> Iterator[Case]:
    """Yield the cases with sizes of decode and prefill steps."""
    for tokens in (2, 5) if toy else (1, 256, 4096):
        yield norm(device, tokens, 64 if toy else 4096, toy)
        yield add_norm(device, tokens, 64 if toy else 4096, toy)
        yield gate(device, tokens, 64 if toy else 14336, toy)
        yield rotation(device, tokens, toy)
    yield copies(device, 2 if toy else 512, toy)
    yield from swaps(device, 2 if toy else 256, toy)


def norm(device: Device, tokens: int, width: int, toy: bool) -> Case:
    """Return the case of RMSNorm, which reads and writes each row once."""
    moved = 4.0 * tokens * width
    where = device.torch_device
    weight = torch.ones(width, dtype=BF16, device=where)
    pairs = [
        (x := torch.randn(tokens, width, device=where).to(BF16), torch.empty_like(x))
        for _ in range(num_calls(moved, toy))
    ]
    calls = [partial(rms_norm, device, x, weight, 1e-5, out) for x, out in pairs]
    return Case(f"rms_norm, {tokens} tokens", calls, moved)


def add_norm(device: Device, tokens: int, width: int, toy: bool) -> Case:
    """Return the case of a residual addition with RMSNorm, which reads two rows and writes two."""
    moved = 8.0 * tokens * width
    where = device.torch_device
    weight = torch.ones(width, dtype=BF16, device=where)
    fours = [
        (
            x := torch.randn(tokens, width, device=where).to(BF16),
            torch.zeros_like(x),
            torch.empty_like(x),
            torch.empty_like(x),
        )
        for _ in range(num_calls(moved, toy))
    ]
    calls = [
        partial(add_rms_norm, device, x, residual, weight, 1e-5, out, total)
        for x, residual, out, total in fours
    ]
    return Case(f"add_rms_norm, {tokens} tokens", calls, moved)


def gate(device: Device, tokens: int, width: int, toy: bool) -> Case:
    """Return the case of SiLU and multiply, which reads two halves and writes one."""
    moved = 6.0 * tokens * width
    where = device.torch_device
    pairs = [
        (
            torch.randn(tokens, 2 * width, device=where).to(BF16),
            torch.empty(tokens, width, dtype=BF16, device=where),
        )
        for _ in range(num_calls(moved, toy))
    ]
    calls = [partial(gated, device, x, Gate.SILU, out) for x, out in pairs]
    return Case(f"silu_and_mul, {tokens} tokens", calls, moved)


def rotation(device: Device, tokens: int, toy: bool) -> Case:
    """Return the case of RoPE with the KV write, which reads and writes queries, keys and values once."""
    where = device.torch_device
    heads = HEADS + 2 * KV_HEADS
    moved = 4.0 * tokens * heads * HEAD_DIM
    rows = step_rows(device, tokens, 0, 1)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=where).repeat(1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    shape = (2, blocks_for(tokens, 1), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    count = num_calls(moved, toy)
    caches = [torch.zeros(shape, dtype=BF16, device=where) for _ in range(min(count, 2))]
    inputs = [torch.randn(tokens, heads, HEAD_DIM, device=where).to(BF16) for _ in range(count)]
    calls = []
    for i, qkv in enumerate(inputs):
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        cache, out = caches[i % len(caches)], torch.empty_like(q)
        calls.append(partial(rope_kv, device, q, k, v, cos, sin, cache, rows, out=out))
    return Case(f"rope and KV write, {tokens} tokens", calls, moved)


def copies(device: Device, num_pairs: int, toy: bool) -> Case:
    """Return the case of block copies, which read and write each block once in all layers."""
    pool, block_bytes = device_pool(device, 2 * num_pairs, toy)
    pairs = torch.arange(2 * num_pairs, dtype=torch.int32).view(2, num_pairs).T.contiguous()
    call = partial(copy_blocks, device, pool, pool, pairs.to(device.torch_device))
    return Case(f"copy of {num_pairs} blocks", [call], 2.0 * num_pairs * block_bytes)


def swaps(device: Device, num_pairs: int, toy: bool) -> Iterator[Case]:
    """Yield the cases of block copies to and from pinned host memory, which the bus limits."""
    pool, block_bytes = device_pool(device, num_pairs, toy)
    shape = (num_pairs, pool.block_bytes)
    host = BlockPool.of(device, [device.pinned(shape, torch.uint8) for _ in pool.places])
    same = torch.arange(num_pairs, dtype=torch.int32).repeat(2, 1).T.contiguous().to(device.torch_device)
    for name, source, target in (("out", pool, host), ("in", host, pool)):
        call = partial(copy_blocks, device, source, target, same)
        yield Case(f"swap {name} of {num_pairs} blocks", [call], float(num_pairs * block_bytes))


def device_pool(device: Device, num_blocks: int, toy: bool) -> tuple[BlockPool, int]:
    """Return the KV memory of a whole model, and the bytes of a block in all its layers."""
    layers, kv_heads, head_dim = (2, 2, 16) if toy else (LAYERS, KV_HEADS, HEAD_DIM)
    shape = (num_blocks, 2, kv_heads, BLOCK_SIZE, head_dim)
    memory = [torch.zeros(shape, dtype=BF16, device=device.torch_device) for _ in range(layers)]
    pool = BlockPool.of(device, memory)
    return pool, layers * pool.block_bytes
