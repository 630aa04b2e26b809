"""One norm of a model, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    """What a norm takes away."""

    RMS = "rms"
    """The root mean square."""
    LAYER = "layer"
    """The mean and the standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """One norm; what a checkpoint calls it is said by `Names`, by the place where it stands."""

    kind: NormKind
    eps: float
    offset: float = 0.0
    """Added to the weight."""
    rounds_once: bool = False
    """See `quintet.executor.layers.norm.Norm`."""
    weighted: bool = True
    biased: bool = False
