"""Search for group scales with the least squared rounding error.

Values are rounded to codes, ``x ~ scale * code`` or ``x ~ scale * code - minimum``. For fixed codes, the best scale
(and minimum) is a small least-squares problem with a closed solution. For a fixed scale, the nearest codes are best.
The search starts from several scales around the one that just covers the extremes, solves each, and iterates from the
best. It is Lloyd's iteration with uniform levels (S. Lloyd, "Least squares quantization in PCM", 1982).

Values are float32 ``[n, groups]``: groups are columns, so arithmetic runs over long rows. Results have one value for
each group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 1e-30
"""Smallest divisor: a group of zeros has scale zero."""
SPREAD = 0.11
"""Relative distance of the first candidates from the extreme; 0.11 loses least for Gaussian values."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Values of codes before scaling."""

    low: float
    high: float
    table: tuple[int, ...] | None = None
    """Ascending values; None: all integers from ``low`` to ``high``."""

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the nearest level of each value; may overwrite x."""
        if self.table is None:
            return x.round_().clamp_(self.low, self.high)
        return torch.tensor(self.table, dtype=torch.float32)[self.codes(x).int()]

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        """Return the index of the nearest level."""
        if self.table is None:
            return x.round_().clamp_(self.low, self.high).sub_(self.low).to(torch.uint8)
        return self._of_whole()[x.round_().clamp_(self.low, self.high).sub_(self.low).to(torch.int32)]

    def _of_whole(self) -> torch.Tensor:
        """Return the index of the nearest level of each integer; levels are integers."""
        assert self.table is not None
        whole = torch.arange(self.low, self.high + 1, dtype=torch.float32)
        return (whole[:, None] - torch.tensor(self.table)).abs().argmin(1).to(torch.uint8)


def fit_scale(x: torch.Tensor, levels: Levels, steps: int = 3, positive: bool = False) -> torch.Tensor:
    """Return the scale, of either sign unless ``positive``.

    steps: candidates on each side of the scale that maps the extreme to the lowest level.
    """
    extreme = safe(torch.gather(x, 0, x.abs().argmax(0, keepdim=True)))
    best, best_gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    if positive:
        extreme = extreme.abs()
    for end in (abs(levels.low) if positive else levels.low, levels.high):
        for step in range(-steps, steps + 1):
            target = end + SPREAD * step / steps * abs(levels.low)
            scale, gain = _solved(x, levels.nearest(x * (target / extreme)))
            better = gain > best_gain
            best, best_gain = torch.where(better, scale, best), torch.where(better, gain, best_gain)
    for _ in range(2):
        scale, gain = _solved(x, levels.nearest(x / safe(best)))
        better = gain > best_gain
        best, best_gain = torch.where(better, scale, best), torch.where(better, gain, best_gain)
    return best.squeeze(0)


def _solved(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scale for these codes, and the explained sum of squares."""
    product, square = (x * codes).sum(0, keepdim=True), codes.square().sum(0, keepdim=True)
    scale = product / square.clamp_min(TINY)
    return scale, product * scale


def fit_affine(x: torch.Tensor, most: int, steps: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum, both non-negative, for ``scale * code - minimum`` with codes from 0 to ``most``."""
    least, largest = x.amin(0, keepdim=True).clamp_max(0), x.amax(0, keepdim=True)
    width = (largest - least).clamp_min(TINY)
    best, best_gain = (width / most, -least), torch.full_like(width, -torch.inf)
    for step in range(-steps, steps + 3):
        from_best = step > steps
        start = best if from_best else (width / (most + 1.2 * step / max(steps, 1)), -least)
        scale, minimum, gain = _solved_affine(x, ((x + start[1]) / safe(start[0])).round_().clamp_(0, most))
        better = gain > best_gain
        best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
        best_gain = torch.where(better, gain, best_gain)
    return best[0].squeeze(0), best[1].squeeze(0)


def _solved_affine(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best scale and minimum for these codes, and the gain: see `_solved`.

    A negative minimum is replaced by zero with its best scale.
    """
    count = x.shape[0]
    sum_x, sum_q = x.sum(0, keepdim=True), codes.sum(0, keepdim=True)
    product, square = (x * codes).sum(0, keepdim=True), codes.square().sum(0, keepdim=True)
    determinant = count * square - sum_q.square()
    scale = (count * product - sum_x * sum_q) / determinant.clamp_min(TINY)
    scale = torch.where(determinant > 0, scale, torch.zeros_like(scale))  # all codes are equal
    minimum = (scale * sum_q - sum_x) / count
    without = minimum < 0
    scale = torch.where(without, product / square.clamp_min(TINY), scale).clamp_min_(0)
    minimum = torch.where(without, torch.zeros_like(minimum), minimum)
    return scale, minimum, scale * product - minimum * sum_x


def safe(scale: torch.Tensor) -> torch.Tensor:
    """Return scales with 1 for 0, to divide groups of zeros."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
