"""Norm, gate and rotary positions in bf16 on a CPU with the kernels of ``csrc/cpu/pointwise.cpp``.

Each takes what its reference takes; other dtypes and layouts, and machines without the kernels, are the reference's.
"""

from __future__ import annotations

import torch

from quintet.executor.ops.host_library import host_library
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope_kv_write
from quintet.executor.ops.silu_and_mul import silu_and_mul

BF16 = torch.bfloat16


def rms_norm_on_host(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`. Rounds where it does; only the mean is summed in another order."""
    library, width = host_library(), x.shape[-1]
    plain = x.dtype is BF16 and x.dim() in {2, 3} and x.stride(-1) == 1
    if library is None or not plain or weight.dtype is not BF16 or weight.shape != (width,):
        return rms_norm(x, weight, eps)
    y = torch.empty(x.shape, dtype=BF16)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    library.rms_norm(
        *(x.data_ptr(), x.stride(0), head_stride, x.shape[0], heads, width),
        *(weight.contiguous().data_ptr(), eps, y.data_ptr(), torch.get_num_threads()),
    )
    return y


def silu_and_mul_on_host(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_and_mul`. Rounds where it does; only the exponential is computed in another way."""
    library = host_library()
    if library is None or gate_up.dtype is not BF16 or gate_up.dim() != 2 or gate_up.stride(1) != 1:
        return silu_and_mul(gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, width), dtype=BF16)
    library.silu_and_mul(
        gate_up.data_ptr(), gate_up.stride(0), num_tokens, width, y.data_ptr(), torch.get_num_threads()
    )
    return y


def rope_kv_write_on_host(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    write_index: torch.Tensor,
) -> torch.Tensor:
    """See `rope_kv_write`. Rounds once, where the reference also rounds the products with ``sin``."""
    library = host_library()
    tensors = (qkv, cos, sin, kv)
    plain = all(tensor.dtype is BF16 and tensor.is_contiguous() for tensor in tensors)
    if library is None or not plain or write_index.dtype is not torch.int64:
        return rope_kv_write(qkv, num_heads, num_kv_heads, cos, sin, kv, write_index)
    num_tokens, all_heads, head_dim = qkv.shape
    if all_heads != num_heads + 2 * num_kv_heads or kv.shape[2] != num_kv_heads or kv.shape[4] != head_dim:
        raise ValueError(
            f"qkv is {list(qkv.shape)} and kv {list(kv.shape)}; expected [num_tokens, {num_heads} + 2 * {num_kv_heads},"
            f" head_dim] and [2, num_blocks, {num_kv_heads}, block_size, head_dim]"
        )
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=BF16)
    library.rope_kv_write(
        *(qkv.data_ptr(), num_tokens, num_heads, num_kv_heads, head_dim),
        *(cos.data_ptr(), sin.data_ptr(), cos.shape[-1], kv[0].data_ptr(), kv[1].data_ptr()),
        *(write_index.contiguous().data_ptr(), queries.data_ptr(), torch.get_num_threads()),
    )
    return queries
