"""Torch's variable-length paged attention (torch.nn.attention.varlen) as a backend.

Its cache layout has positions before heads; it reads a transposed view of our cache.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.tables import StepRows


class TorchAttention:
    """An `AttentionBackend` over ``varlen_attn`` with a block table."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        require(needs.dtype.itemsize == 2, f"the model is {needs.dtype}; bf16 and fp16 are supported")
        require(
            needs.kv_dtype == needs.dtype,
            f"the KV cache is {needs.kv_dtype}; only the model's dtype is supported",
        )
        require(
            needs.head_dim <= 256 and needs.head_dim % 8 == 0,
            f"head_dim is {needs.head_dim}; multiples of 8 up to 256 are supported",
        )
        require(needs.soft_cap == 0.0, "the model uses softcap, which is not supported")
        require(needs.alibi is None, "the model uses ALiBi, which is not supported")
        # The parameters for blocks are newer than the module; if they are missing, the probe fails.
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn
        self._needs = needs
        self._lengths = self._tables = self._padding = torch.empty(0)

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Gather the rows' lengths and block tables in row order, on the device."""
        self._lengths = rows.starts + rows.counts
        self._tables = rows.block_table.index_select(0, rows.slots.clamp(min=0))
        self._padding = (rows.token_rows < 0)[:, None, None]

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        attended = self._attend(
            q,
            kv[0].transpose(1, 2),
            kv[1].transpose(1, 2),
            rows.offsets,
            None,
            rows.max_count,
            self._tables.shape[1] * rows.block_size,
            scale=self._needs.scale,
            # The left window excludes the token itself.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=self._needs.num_heads != self._needs.num_kv_heads,
            seqused_k=self._lengths,
            block_table=self._tables,
        )
        assert isinstance(attended, torch.Tensor), "varlen_attn returns a tuple only on request"
        attended.masked_fill_(self._padding, 0.0)
        return attended
