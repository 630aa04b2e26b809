"""FlashInfer's attention over paged KV as a backend, where the package is installed.

It plans a step on the host, so it is given the rows' lengths from the plan; its list of blocks is gathered on the device.
A plan belongs to one window, so there is a wrapper per window.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows
from quintet.executor.ragged import ranges

WORKSPACE_BYTES = 128 << 20
"""For the parts of split rows; the size its documentation recommends. Wrappers share it, as layers run one by one."""


class FlashInferAttention:
    """An `AttentionBackend` over ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        require(needs.dtype.itemsize == 2, f"the model is {needs.dtype}, it takes bf16 and fp16")
        require(
            needs.kv_dtype == needs.dtype,
            f"KV is {needs.kv_dtype}; only the model's own format is used with it",
        )
        require(needs.head_dim in (64, 128, 256), f"heads of {needs.head_dim}, it takes 64, 128 and 256")
        require(needs.alibi is None, "the model uses ALiBi, with slopes that it does not take")
        import flashinfer

        self._needs = needs
        self._place = device.torch_device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._place)
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            for window in needs.windows
        }

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Plan every window's step."""
        needs, size = self._needs, rows.block_size
        lengths = host.starts.astype(np.int64) + host.counts
        blocks = -(-lengths // size)
        row, index = ranges(np.zeros(len(blocks), np.int64), blocks)
        places = torch.from_numpy(np.stack((row, index))).to(self._place, non_blocking=True)
        slots = rows.slots[: len(lengths)].long()
        indices = rows.block_table[slots[places[0]], places[1]]
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

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
        wrapper = self._wrappers[window]
        wrapper.run(q.contiguous(), (kv[0], kv[1]), out=out)
        return out


def _starts_of(counts: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> torch.Tensor:
    """Return int32[rows + 1] on the host: where each row's share begins."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)
