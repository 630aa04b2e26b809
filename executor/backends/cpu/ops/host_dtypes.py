"""The numbers by which the host kernels know number formats: ``qt::Dtype`` of csrc/cpu/work.hpp."""

from __future__ import annotations

import torch

FLOAT_CODES: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Of activations, and of weights and KV that are stored as they are."""

FLOAT_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in FLOAT_CODES.items()}

DTYPE_CODES: dict[torch.dtype, int] = FLOAT_CODES | {torch.int8: 3, torch.quint4x2: 4, torch.float8_e4m3fn: 5}
"""Of KV too. No tensor has 4 bits: it is a cache's format alone."""

NARROW_KV: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.quint4x2,
    "fp8": torch.float8_e4m3fn,
}
"""Formats of a cache that is not the activations', by their names in the configuration."""
