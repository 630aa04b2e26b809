"""One norm of a model, and where they stand around a block, as values."""

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
    """See `quintet.executor.models.layers.norm.Norm`."""
    weighted: bool = True
    biased: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Where norms stand around a mixer or a feed-forward: ``of_sum(x + behind(mixer(before(x))))``. None: none there."""

    before: NormSpec | None = None
    """`Names.mixer_norm`, `Names.mlp_norm`."""
    behind: NormSpec | None = None
    """`Names.mixer_out_norm`, `Names.mlp_out_norm`."""
    of_sum: NormSpec | None = None
    """`Names.mixer_norm`, `Names.mlp_norm`, there instead of before."""
