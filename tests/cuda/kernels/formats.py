"""Number formats for tests of row-wise kernels: their steps, and reproducible numbers."""

from __future__ import annotations

import torch

FORMATS = [torch.bfloat16, torch.float16, torch.float32]

STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
"""The largest distance of adjacent numbers, as a share of the smaller."""


def noise(*shape: int, dtype: torch.dtype, where: torch.device, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(where)


def small_integers(*shape: int, dtype: torch.dtype, where: torch.device, seed: int = 0) -> torch.Tensor:
    """Return whole numbers from -8 to 8: fp32 holds sums of their squares exactly, in any order of addition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype).to(where)


def assert_within_steps(actual: torch.Tensor, expected: torch.Tensor, steps: int, floor: float = 0.0) -> None:
    """Assert that numbers differ by at most this many steps of their format; ``floor`` is the bound for small ones."""
    torch.testing.assert_close(actual, expected, rtol=steps * STEP[actual.dtype], atol=floor)
