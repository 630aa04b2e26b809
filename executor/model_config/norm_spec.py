"""Specification of a norm, and of the norms around a block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    """Kind of a normalization."""

    RMS = "rms"
    """Divides by the root mean square."""
    LAYER = "layer"
    """Subtracts the mean and divides by the standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """One norm; its position in the layer determines its tensor name in `Names`."""

    kind: NormKind
    eps: float
    offset: float = 0.0
    """Constant added to the weight."""
    rounds_once: bool = False
    """See `quintet.executor.models.layers.norm.Norm`."""
    weighted: bool = True
    biased: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Norms around a mixer or feed-forward: ``of_sum(x + after(mixer(before(x))))``; None for no norm."""

    before: NormSpec | None = None
    """`Names.mixer_norm`, `Names.mlp_norm`."""
    after: NormSpec | None = None
    """`Names.mixer_out_norm`, `Names.mlp_out_norm`."""
    of_sum: NormSpec | None = None
    """`Names.mixer_norm`, `Names.mlp_norm`, used instead of ``before``."""
