"""Attention of rows with few new tokens in bf16 on a CPU, straight over the pages: ``csrc/cpu/paged_attention.cpp``.

Rows of many new tokens remain torch's.
"""

from __future__ import annotations

import torch

from quintet.executor.ops.host_library import HostLibrary, host_library
from quintet.executor.ops.paged_attention import (
    AttentionRows,
    InPlaceRows,
    attend_gathered,
    paged_attention,
)


def reads_pages_in_place_on_host(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Return whether the kernel is there and takes such heads."""
    library = host_library()
    if library is None or dtype is not torch.bfloat16:
        return False
    return bool(library.paged_attention_takes(num_heads, num_kv_heads, head_dim))


def paged_attention_on_host(
    q: torch.Tensor, kv: torch.Tensor, groups: tuple[AttentionRows, ...], scale: float
) -> torch.Tensor:
    """See `paged_attention`."""
    library = host_library()
    if library is None or not any(isinstance(group, InPlaceRows) for group in groups):
        return paged_attention(q, kv, groups, scale)
    q = q.contiguous()
    out = torch.empty_like(q)
    for group in groups:
        if isinstance(group, InPlaceRows):
            _attend_in_place(library, q, kv, group, scale, out)
        else:
            out[group.tokens] = attend_gathered(q[group.tokens], kv, group, scale)
    return out


def _attend_in_place(
    library: HostLibrary,
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: InPlaceRows,
    scale: float,
    out: torch.Tensor,
) -> None:
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[2:4]
    for name, tensor in (("q", q), ("kv", kv)):
        if tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous() or tensor.shape[-1] != head_dim:
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()};"
                f" expected contiguous bfloat16[..., {head_dim}]"
            )
    if not library.paged_attention_takes(heads, kv_heads, head_dim):
        raise ValueError(
            f"q has {heads} heads of {head_dim} for {kv_heads} KV heads; `reads_pages_in_place_on_host` says what is taken"
        )
    assert rows.block_table.dtype is torch.int32 and rows.block_table.stride(1) == 1, rows.block_table
    library.paged_attention(
        *(q.data_ptr(), kv[0].data_ptr(), kv[1].data_ptr()),
        *(rows.block_table.data_ptr(), rows.block_table.stride(0), rows.slots.data_ptr()),
        *(
            rows.positions.data_ptr(),
            None if rows.tokens is None else rows.tokens.data_ptr(),
            len(rows.slots),
        ),
        *(heads, kv_heads, head_dim, block_size, rows.window or 0, scale),
        *(out.data_ptr(), torch.get_num_threads()),
    )
