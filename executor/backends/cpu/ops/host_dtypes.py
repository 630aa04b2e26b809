"""Dtype codes of the host kernels: ``qt::Dtype`` of csrc/cpu/runtime/work.hpp."""

from __future__ import annotations

import torch

FLOAT_CODES: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Dtypes of activations, and of unquantized weights and KV."""

FLOAT_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in FLOAT_CODES.items()}

DTYPE_CODES: dict[torch.dtype, int] = FLOAT_CODES | {torch.int8: 3, torch.quint4x2: 4, torch.float8_e4m3fn: 5}
"""Also dtypes of the KV cache. ``quint4x2`` only names the 4-bit cache; no tensor has it."""

NARROW_KV: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.quint4x2,
    "fp8": torch.float8_e4m3fn,
}
"""Quantized cache dtypes by their names in the configuration."""
