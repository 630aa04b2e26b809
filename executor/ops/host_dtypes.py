"""The numbers by which the host kernels know number formats: ``qt::Dtype`` of csrc/cpu/work.hpp."""

from __future__ import annotations

import torch

FLOAT_CODES: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Of activations, and of weights and KV that are stored as they are."""

DTYPE_CODES: dict[torch.dtype, int] = FLOAT_CODES | {torch.int8: 3}
"""Of KV too."""
