"""Extension point for attention in steps with prompts: the backend's interface and constructor, and our kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import paged_attention
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.tables import StepRows


class UnsupportedError(Exception):
    """The backend does not support this model's attention; the message has the reason for the log."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Attention requirements of a model and its settings."""

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
    """Rows of a step on the host, without padding; for libraries that plan on the host."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]


class AttentionBackend(Protocol):
    """Computes one model's attention in eager steps."""

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Prepare a step, without waiting for the device. `AttentionPlan.prepare` was launched before."""

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        """Compute attention as `quintet.executor.backends.cuda.ops.attention.paged_attention` does, with zeros for padding.

        Scale, softcap and ALiBi slopes come from the needs; ``window`` is one of their windows.
        """


OpenBackend = Callable[[Device, AttentionPlan, AttentionNeeds], AttentionBackend]
"""Constructor of a backend, named by the registry and by entry points of ``quintet.attention``. Raises `UnsupportedError`."""


def require(condition: bool, reason: str) -> None:
    """Raise `UnsupportedError` unless the condition holds. reason: the requirement and the supported values."""
    if not condition:
        raise UnsupportedError(reason)


class QuintetAttention:
    """An `AttentionBackend` over our kernels: they support every model, and use fixed splits with --batch-invariant."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        self._device, self._plan, self._needs = device, plan, needs

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Do nothing: the runner prepares the plan in every step."""

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        needs = self._needs
        return paged_attention(
            self._device, self._plan, q, kv, rows, needs.scale, window, needs.soft_cap, needs.alibi
        )
