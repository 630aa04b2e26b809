"""Which scales round a group of numbers with the least squared error, by search.

A group is rounded to codes, ``x ~ scale * code`` or ``x ~ scale * code - minimum``. With the codes given, the best scale (and
minimum) is a small least-squares problem with a closed solution; with these given, the best codes are the nearest. So each
search takes some scales around the one that just holds the group's extremes, solves for each, keeps the best, and goes on from
there. This is Lloyd's iteration with evenly spaced levels (S. Lloyd, "Least squares quantization in PCM", 1982), from several
starts.

Numbers are float32 ``[n, groups]``: a group lies along the first dimension, so that all arithmetic is over long rows. What is
returned has a number for each group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 1e-30
"""In place of nothing as a divisor: a group of zeros has a scale of zero."""
SPREAD = 0.11
"""How far from a group's extreme the search begins, in parts of it: Gaussian numbers lose most by less, and by more."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What codes stand for, before the scale."""

    low: float
    high: float
    table: tuple[int, ...] | None = None
    """In rising order; None: all whole numbers from ``low`` to ``high``."""

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the nearest level of each number; x may be written to."""
        if self.table is None:
            return x.round_().clamp_(self.low, self.high)
        return torch.tensor(self.table, dtype=torch.float32)[self.codes(x).int()]

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        """Return which level is nearest, counted from the lowest."""
        if self.table is None:
            return x.round_().clamp_(self.low, self.high).sub_(self.low).to(torch.uint8)
        return self._of_whole()[x.round_().clamp_(self.low, self.high).sub_(self.low).to(torch.int32)]

    def _of_whole(self) -> torch.Tensor:
        """Return the nearest level of each whole number, counted from the lowest: no level lies between two of these."""
        assert self.table is not None
        whole = torch.arange(self.low, self.high + 1, dtype=torch.float32)
        return (whole[:, None] - torch.tensor(self.table)).abs().argmin(1).to(torch.uint8)


def fit_scale(x: torch.Tensor, levels: Levels, steps: int = 3, positive: bool = False) -> torch.Tensor:
    """Return the scale, of either sign unless it is to be ``positive``.

    steps: starts on each side of the one with which the extreme is the lowest level."""
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
    """Return the best scale for these codes, and how much of the squared numbers it explains."""
    product, square = (x * codes).sum(0, keepdim=True), codes.square().sum(0, keepdim=True)
    scale = product / square.clamp_min(TINY)
    return scale, product * scale


def fit_affine(x: torch.Tensor, most: int, steps: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of codes from 0 to ``most``, and the minimum, neither negative, for ``scale * code - minimum``."""
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

    Where the minimum would be negative it is zero, and the scale the best one to that.
    """
    count = x.shape[0]
    sum_x, sum_q = x.sum(0, keepdim=True), codes.sum(0, keepdim=True)
    product, square = (x * codes).sum(0, keepdim=True), codes.square().sum(0, keepdim=True)
    determinant = count * square - sum_q.square()
    scale = (count * product - sum_x * sum_q) / determinant.clamp_min(TINY)
    scale = torch.where(determinant > 0, scale, torch.zeros_like(scale))  # of codes that are all alike
    minimum = (scale * sum_q - sum_x) / count
    without = minimum < 0
    scale = torch.where(without, product / square.clamp_min(TINY), scale).clamp_min_(0)
    minimum = torch.where(without, torch.zeros_like(minimum), minimum)
    return scale, minimum, scale * product - minimum * sum_x


def safe(scale: torch.Tensor) -> torch.Tensor:
    """Return scales by which may be divided: what a scale of zero divides is of a group of zeros."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
