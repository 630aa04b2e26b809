"""Dequantized GGML blocks, against the `gguf` package on the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quintet.executor.checkpoints.gguf.blocks.dequantize import dequantize
from quintet.executor.checkpoints.gguf.types import TYPES

BLOCKS = 300


@pytest.mark.parametrize(
    "kind", [each for each in TYPES.values() if each.name != "Q8_K"], ids=lambda kind: kind.name
)
def test_dequantized_bytes_equal_the_gguf_package(kind):
    """Random bytes cover every scale, including infinities and NaN."""
    raw = np.random.default_rng(1).integers(0, 256, BLOCKS * kind.block_bytes, np.uint8)
    ours = torch.empty(BLOCKS * kind.block)
    dequantize(torch.from_numpy(raw), kind, ours)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[kind.name]).reshape(-1)
    numbers = ~np.isnan(theirs)
    assert numbers.mean() > 0.9
    assert np.array_equal(ours.numpy()[numbers].view(np.int32), theirs[numbers].view(np.int32))
    assert np.isnan(ours.numpy()[~numbers]).all()


def test_q8_k_is_scale_times_integers():
    """The package lacks this type, which llama.cpp uses for activations."""
    numbers = np.arange(256).astype(np.uint8)
    raw = np.concatenate(
        [np.frombuffer(np.float32(0.3).tobytes(), np.uint8), numbers, np.zeros(32, np.uint8)]
    )
    out = torch.empty(256)
    dequantize(torch.from_numpy(raw), TYPES[15], out)
    assert out.tolist() == (numbers.view(np.int8) * np.float32(0.3)).tolist()
