"""Our kernels as an attention backend: supports every model, and uses fixed splits with --batch-invariant."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import paged_attention
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows


class QuintetAttention:
    """An `AttentionBackend` over `paged_attention`."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        self._device, self._plan, self._needs = device, plan, needs

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Do nothing: the runner prepares the plan in every step."""

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        needs = self._needs
        return paged_attention(
            self._device, self._plan, q, kv, rows, needs.scale, window, needs.soft_cap, needs.alibi, out
        )
