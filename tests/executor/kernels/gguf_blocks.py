"""Random GGUF blocks and their dequantization, written in numpy from ggml's definitions of its types.

Each function takes ``uint8[blocks, bytes]`` and returns ``float32[blocks, k]``: scale times integer, then the minimum, each
rounded to fp32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def bits(packed: Bytes, apart: int, count: int) -> Bytes:
    """Return ``[blocks, 8 / apart, bytes]``: ``count`` bits at every ``apart``-th bit of each byte."""
    places = np.arange(0, 8, apart, dtype=np.uint8)[None, :, None]
    return packed[:, None, :] >> places & (2**count - 1)


def q8_0(b: Bytes) -> Floats:
    return half(b, 0) * b[:, 2:].view(np.int8)


def q4_0(b: Bytes) -> Floats:
    return half(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def q4_1(b: Bytes) -> Floats:
    return half(b, 0) * nibbles(b[:, 4:]) + half(b, 2)


def fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def q5_0(b: Bytes) -> Floats:
    return half(b, 0) * ((nibbles(b[:, 6:]) | fifth_bits(b[:, 2:6])).astype(np.float32) - 16)


def q5_1(b: Bytes) -> Floats:
    return half(b, 0) * (nibbles(b[:, 8:]) | fifth_bits(b[:, 4:8])) + half(b, 2)


def six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6) << 4], axis=1)
    return scales, np.concatenate([second & 63, last >> 4 | (second >> 6) << 4], axis=1)


def with_minima(b: Bytes, codes: Bytes) -> Floats:
    scales, minima = six_bit_scales(b[:, 4:16])
    grouped = codes.reshape(len(b), 8, 32)
    numbers = (half(b, 0) * scales)[:, :, None] * grouped - (half(b, 2) * minima)[:, :, None]
    return numbers.reshape(len(b), 256)


def nibbles_of_pairs(packed: Bytes) -> Bytes:
    return nibbles(packed.reshape(-1, 32)).reshape(len(packed), 256)


def q4_k(b: Bytes) -> Floats:
    return with_minima(b, nibbles_of_pairs(b[:, 16:]))


def q5_k(b: Bytes) -> Floats:
    upper = bits(b[:, 16:48], 1, 1).reshape(len(b), 256)
    return with_minima(b, nibbles_of_pairs(b[:, 48:]) | upper << 4)


def lower_pairs(packed: Bytes) -> Bytes:
    return bits(packed.reshape(-1, 32), 2, 2).reshape(len(packed), 256)


def q6_k(b: Bytes) -> Floats:
    lower = nibbles(b[:, :128].reshape(-1, 64)).reshape(len(b), 256)
    codes = (lower | lower_pairs(b[:, 128:192]) << 4).astype(np.float32) - 32
    scales = half(b, 208) * b[:, 192:208].view(np.int8)
    return (scales[:, :, None] * codes.reshape(len(b), 16, 16)).reshape(len(b), 256)


def q3_k(b: Bytes) -> Floats:
    upper = bits(b[:, :32], 1, 1).reshape(len(b), 256)
    codes = (lower_pairs(b[:, 32:96]) | upper << 2).astype(np.float32) - 4
    lower = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    scales = (lower | bits(b[:, 104:108], 2, 2).reshape(len(b), 16) << 4).astype(np.float32) - 32
    return ((half(b, 108) * scales)[:, :, None] * codes.reshape(len(b), 16, 16)).reshape(len(b), 256)


def q2_k(b: Bytes) -> Floats:
    codes = lower_pairs(b[:, 16:80]).reshape(len(b), 16, 16)
    scales, minima = half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
    return (scales[:, :, None] * codes - minima[:, :, None]).reshape(len(b), 256)


UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def iq4_nl(b: Bytes) -> Floats:
    return half(b, 0) * UNEVEN[nibbles(b[:, 2:])]


def iq4_xs(b: Bytes) -> Floats:
    lower = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    upper = bits(b[:, 2:4], 2, 2).transpose(0, 2, 1).reshape(len(b), 8)
    scales = half(b, 0) * ((lower | upper << 4).astype(np.float32) - 32)
    codes = nibbles(b[:, 8:].reshape(-1, 16)).reshape(len(b), 8, 32)
    return (scales[:, :, None] * UNEVEN[codes]).reshape(len(b), 256)


def mxfp4(b: Bytes) -> Floats:
    return np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 127) * FP4[nibbles(b[:, 1:])]


BLOCKS: dict[WeightFormat, tuple[Callable[[Bytes], Floats], tuple[int, ...]]] = {
    WeightFormat.INT8: (q8_0, (0,)),
    WeightFormat.INT4: (q4_0, (0,)),
    WeightFormat.Q4_1: (q4_1, (0, 2)),
    WeightFormat.Q5_0: (q5_0, (0,)),
    WeightFormat.Q5_1: (q5_1, (0, 2)),
    WeightFormat.Q2_K: (q2_k, (80, 82)),
    WeightFormat.Q3_K: (q3_k, (108,)),
    WeightFormat.Q4_K: (q4_k, (0, 2)),
    WeightFormat.Q5_K: (q5_k, (0, 2)),
    WeightFormat.Q6_K: (q6_k, (208,)),
    WeightFormat.IQ4_NL: (iq4_nl, (0,)),
    WeightFormat.IQ4_XS: (iq4_xs, (0,)),
    WeightFormat.MXFP4: (mxfp4, ()),
}
"""Reference of each format, and offsets of the fp16 numbers in a block."""


def group_of(form: WeightFormat) -> int:
    """Return the group size of a weight of blocks."""
    return 0 if form.has_own_group else 32


def random_rows(
    form: WeightFormat, columns: int, depth: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks ``uint8[columns, row bytes]`` with finite scales, and their numbers ``[columns, depth]``."""
    block = form.block(group_of(form))
    assert block is not None
    k, size = block
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (columns * depth // k, size), np.uint8)
    dequantize, halves = BLOCKS[form]
    for at in halves:
        scales = random.standard_normal(len(blocks)).astype(np.float16) * np.float16(0.01)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if form is WeightFormat.MXFP4:
        blocks[:, 0] = blocks[:, 0] % 16 + 112
    numbers = dequantize(blocks).astype(np.float32).reshape(columns, depth)
    return torch.from_numpy(blocks.reshape(columns, -1)), torch.from_numpy(numbers)


def products() -> str:
    """Return a digest of products of all formats, at several numbers of rows."""
    library = linear_library()
    assert library is not None
    digest = hashlib.sha256()
    for form in BLOCKS:
        weight = PackedWeight(library, form, 140, 1280, group=group_of(form))
        weight.fill_blocks(random_rows(form, 140, 1280)[0])
        for rows in (1, 3, 6, 20, 70):
            x = torch.randn(rows, 1280, generator=torch.Generator().manual_seed(rows))
            digest.update(weight.linear(x).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    opened = open_library()
    assert opened is not None
    print(instruction_set(opened), products())
