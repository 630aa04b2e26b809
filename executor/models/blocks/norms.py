"""Norms over values that ranks divide."""

from __future__ import annotations

from quintet.executor.model_config.share import KeptRange
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.norm import Norm


def norm_of_all(ops: ForwardPass[ValueT], x: ValueT, norm: Norm, kept: KeptRange) -> ValueT:
    """Return ``x`` normed over all ranks' columns; ``x`` has the columns ``kept``."""
    if kept.is_all:
        return ops.norm(x, norm)
    return ops.columns(ops.norm(ops.of_all_ranks(x, kept), norm), kept.begin, kept.count)
