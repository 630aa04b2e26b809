"""The seam of attention in steps with prompts: what a backend is asked to compute and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows


class UnsupportedError(Exception):
    """A backend cannot compute this model's attention; the message says why, for the log."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model and its settings ask of attention."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float = 0.0
    alibi: torch.Tensor | None = None
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows as the plan named them: for libraries that plan on the host. Without padding."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]


class AttentionBackend(Protocol):
    """Computes one model's attention in steps that are launched one by one, not captured."""

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Do what is done once per step. Must not wait for the device. `AttentionPlan.prepare` was launched before."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what `quintet.executor.backends.cuda.ops.attention.paged_attention` does, its shapes and zeros for padding too.

        Scale, cap and slopes are those of the needs; ``window`` is one of their windows.
        """
        ...


OpenBackend = Callable[[Device, AttentionPlan, AttentionNeeds], AttentionBackend]
"""What the registry and the entry points of ``quintet.attention`` name. Raises `UnsupportedError`."""


def require(condition: bool, reason: str) -> None:
    """Raise `UnsupportedError` unless the condition holds; ``reason`` says what was needed, and what is supported."""
    if not condition:
        raise UnsupportedError(reason)
