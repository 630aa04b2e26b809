"""FlashInfer attention backend, available if the package is installed.

FlashInfer plans a step on the host from the rows' lengths; the block list is gathered on the device. A FlashInfer plan has one
window, so there is one wrapper per window.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.ragged import ranges

WORKSPACE_BYTES = 128 << 20
"""Workspace for split rows, of the size that FlashInfer recommends. Wrappers share it, because layers run in sequence."""


class FlashInferAttention:
    """An `AttentionBackend` over ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        require(needs.dtype.itemsize == 2, f"the model is {needs.dtype}; bf16 and fp16 are supported")
        require(
            needs.kv_dtype == needs.dtype,
            f"the KV cache is {needs.kv_dtype}; only the model's dtype is supported",
        )
        require(
            needs.head_dim in (64, 128, 256), f"head_dim is {needs.head_dim}; 64, 128 and 256 are supported"
        )
        require(needs.alibi is None, "the model uses ALiBi, which is not supported")
        import flashinfer

        self._needs = needs
        self._torch_device = device.torch_device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._torch_device)
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            for window in needs.windows
        }

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Plan the step for every window."""
        needs, size = self._needs, rows.block_size
        lengths = host.starts.astype(np.int64) + host.counts
        blocks = -(-lengths // size)
        row, index = ranges(np.zeros(len(blocks), np.int64), blocks)
        entries = torch.from_numpy(np.stack((row, index))).to(self._torch_device, non_blocking=True)
        slots = rows.slots[: len(lengths)].long()
        indices = rows.block_table[slots[entries[0]], entries[1]]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                _starts_of(host.counts),
                _starts_of(blocks),
                indices,
                torch.from_numpy(((lengths - 1) % size + 1).astype(np.int32)),
                needs.num_heads,
                needs.num_kv_heads,
                needs.head_dim,
                size,
                causal=True,
                sm_scale=needs.scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=needs.soft_cap,
                q_data_type=needs.dtype,
                kv_data_type=needs.kv_dtype,
            )

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        wrapper = self._wrappers[window]
        wrapper.run(q.contiguous(), (kv[0], kv[1]), out=out)
        return out


def _starts_of(counts: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> torch.Tensor:
    """Return exclusive prefix sums, int32[rows + 1] on the host."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)
