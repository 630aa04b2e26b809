"""Torch's variable-length attention over blocks (torch.nn.attention.varlen) as a backend.

Its kernels take the cache with the heads behind the positions, which a transposed view of ours is.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows


class TorchAttention:
    """An `AttentionBackend` over ``varlen_attn`` with a block table."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        require(needs.dtype.itemsize == 2, f"the model is {needs.dtype}, it takes bf16 and fp16")
        require(needs.kv_dtype == needs.dtype, f"KV is {needs.kv_dtype}, it takes the model's own format")
        require(
            needs.head_dim <= 256 and needs.head_dim % 8 == 0,
            f"heads of {needs.head_dim}, not a multiple of 8 to 256",
        )
        require(needs.soft_cap == 0.0, "the model caps its logits")
        require(needs.alibi is None, "the model uses ALiBi")
        # Its parameters for blocks are younger than the module; where they are missing, the probe finds out.
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn
        self._needs = needs
        self._lengths = self._tables = self._padding = torch.empty(0)

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Bring the rows' lengths and block tables into the order of the rows, on the device."""
        self._lengths = rows.starts + rows.counts
        self._tables = rows.block_table.index_select(0, rows.slots.clamp(min=0))
        self._padding = (rows.token_rows < 0)[:, None, None]

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        attended = self._attend(
            q,
            kv[0].transpose(1, 2),
            kv[1].transpose(1, 2),
            rows.offsets,
            None,
            rows.max_count,
            self._tables.shape[1] * rows.block_size,
            scale=self._needs.scale,
            # It counts the positions before a token's own.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=self._needs.num_heads != self._needs.num_kv_heads,
            seqused_k=self._lengths,
            block_table=self._tables,
        )
        assert isinstance(attended, torch.Tensor), "a tuple is returned only to those who ask for one"
        attended.masked_fill_(self._padding, 0.0)
        return attended if out is None else out.copy_(attended)
