"""Attention over the paged cache and the write to it on a CPU: ``csrc/cpu/attention.cpp``, for bf16, fp16 and fp32 rows.

Owns the cache of a layer (`PagedKv`), the declarations of the C functions that compute at once, and the checks of what they
are given. A compiled step calls the same kernels by `quintet.executor.program.library`. What a token's attention comes to
has the same bits in every batch, however its prompt was cut into chunks. An int8 cache holds a head's keys and values in 255
steps between their largest magnitude and its negative, with an fp32 scale for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from quintet.executor.memory import lazy_zeros
from quintet.executor.ops.host_dtypes import DTYPE_CODES
from quintet.executor.ops.host_library import declare, open_library
from quintet.executor.program.step import CStep, KvPlace
from quintet.wire.errors import ConfigError

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True, slots=True)
class AttentionFunctions:
    """The C functions; each says in ``csrc/cpu/attention.cpp`` what its arguments are."""

    block_bytes: Callable[..., Any]
    write_kv: Callable[..., Any]
    attend: Callable[..., Any]


@cache
def attention_functions() -> AttentionFunctions | None:
    """Declare the functions; None where the library was not built."""
    library = open_library()
    if library is None:
        return None
    a, n, i, f = _ADDRESS, _SIZE, _INT, _FLOAT
    return AttentionFunctions(
        declare(library, "qt_kv_block_bytes", i, n, n, n, result=n),
        declare(library, "qt_write_kv", a, *(a, n, a, n, a, n), n, n, n, n, a, a, f, a, n, a, n, i, i),
        declare(library, "qt_attend", a, a, n, a, n, n, n, n, n, f, a, f, a, n, i, i),
    )


def kv_block_bytes(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Return the bytes of a block of one layer whose keys and values are stored as ``dtype``.

    Raises ConfigError where the kernels do not take such blocks.
    """
    size = int(_functions().block_bytes(DTYPE_CODES[dtype], num_kv_heads, head_dim, block_size))
    if size:
        return size
    if block_size % 16:
        raise ConfigError(
            f"blocks of {block_size} tokens: on a CPU they are multiples of 16; give --block-size 16 or 32"
        )
    raise ConfigError(
        f"heads of {head_dim} numbers: the CPU's attention takes multiples of 16 up to 256; this model needs a GPU"
    )


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The cache of one layer. Zeros, paid for when touched."""

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    block_size: int
    memory: torch.Tensor
    """uint8 ``[num_blocks, bytes]``, inner layout private to the kernels."""

    @property
    def place(self) -> KvPlace:
        """As the kernels are told it: of the only group."""
        return KvPlace(self.memory.data_ptr(), self.memory.stride(0), 0)

    @staticmethod
    def of_blocks(
        num_blocks: int, dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int
    ) -> PagedKv:
        """Reserve ``num_blocks``. Raises ConfigError, see `kv_block_bytes`."""
        size = kv_block_bytes(dtype, num_kv_heads, head_dim, block_size)
        memory = lazy_zeros((num_blocks, size), torch.uint8, torch.device("cpu"))
        return PagedKv(dtype, num_kv_heads, head_dim, block_size, memory)


def write_kv(
    step: CStep,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKv,
    rotary_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return normed and rotated queries ``[num_tokens, num_heads * head_dim]``; write keys and values into ``kv``.

    q: ``[num_tokens, num_heads * head_dim]``; k, v: ``[num_tokens, num_kv_heads * head_dim]``, rows may lie apart; norms:
    ``[head_dim]`` or None. Rounded as `quintet.executor.ops.rms_norm` and `quintet.executor.ops.rope_kv_write`, but for the
    products with sines, which are not rounded by themselves. The step's cosines and sines are in the format of ``q``.
    """
    num_heads, width = q.shape[1] // kv.head_dim, kv.num_kv_heads * kv.head_dim
    for name, x, expected in (("q", q, num_heads * kv.head_dim), ("k", k, width), ("v", v, width)):
        _check(step, name, x, expected, kv)
    if k.dtype is not q.dtype or v.dtype is not q.dtype:
        raise ValueError(f"k is {k.dtype} and v {v.dtype}; expected {q.dtype}, as q is")
    if rotary_dim % 2 or not 0 <= rotary_dim <= kv.head_dim:
        raise ValueError(f"rotary_dim is {rotary_dim}; expected an even number up to {kv.head_dim}")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (
            norm.dtype is not q.dtype or norm.shape != (kv.head_dim,) or not norm.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {norm.dtype}{list(norm.shape)}; expected contiguous {q.dtype}[{kv.head_dim}]"
            )
    out = torch.empty((len(q), q.shape[1]), dtype=q.dtype)
    _functions().write_kv(
        *(
            ctypes.byref(step),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
        ),
        *(num_heads, kv.num_kv_heads, kv.head_dim, rotary_dim),
        *(None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)),
        *(eps, ctypes.byref(kv.place), kv.block_size, out.data_ptr(), out.stride(0)),
        *(DTYPE_CODES[q.dtype], DTYPE_CODES[kv.dtype]),
    )
    return out


def attend(
    step: CStep,
    q: torch.Tensor,
    kv: PagedKv,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention outputs like ``q [num_tokens, num_heads * head_dim]``.

    window: how many keys a token sees, itself included. softcap: scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes: fp32 ``[num_heads]`` (Press et al., "Train short, test long", 2022).
    """
    num_heads = q.shape[1] // kv.head_dim
    _check(step, "q", q, num_heads * kv.head_dim, kv)
    if num_heads % kv.num_kv_heads or not num_heads:
        raise ValueError(
            f"q has {num_heads} heads of {kv.head_dim}; expected a multiple of {kv.num_kv_heads} KV heads"
        )
    if scale <= 0 or (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"scale is {scale}, window {window}, softcap {softcap}; expected positive numbers or None"
        )
    if alibi_slopes is not None and (
        alibi_slopes.dtype is not torch.float32
        or alibi_slopes.shape != (num_heads,)
        or not alibi_slopes.is_contiguous()
    ):
        raise ValueError(
            f"alibi_slopes are {alibi_slopes.dtype}{list(alibi_slopes.shape)}; expected contiguous float32[{num_heads}]"
        )
    out = torch.empty(q.shape, dtype=q.dtype)
    _functions().attend(
        *(ctypes.byref(step), q.data_ptr(), q.stride(0), ctypes.byref(kv.place), num_heads, kv.num_kv_heads),
        *(kv.head_dim, kv.block_size, window or 0, softcap or 0.0),
        *(None if alibi_slopes is None else alibi_slopes.data_ptr(), scale, out.data_ptr(), out.stride(0)),
        *(DTYPE_CODES[q.dtype], DTYPE_CODES[kv.dtype]),
    )
    return out


def _functions() -> AttentionFunctions:
    functions = attention_functions()
    if functions is None:
        raise RuntimeError(
            "the host kernels were not built; see the log of the installation, or use the references"
        )
    return functions


def _check(step: CStep, name: str, x: torch.Tensor, width: int, kv: PagedKv) -> None:
    formats = (torch.bfloat16, torch.float16, torch.float32)
    if x.dim() != 2 or x.shape != (step.num_tokens, width) or x.dtype not in formats or x.stride(1) != 1:
        raise ValueError(
            f"{name} is {x.dtype}{list(x.shape)} with strides {x.stride()}; expected [{step.num_tokens}, {width}] of"
            " bfloat16, float16 or float32 with neighbouring elements in a row"
        )
    if kv.dtype not in (x.dtype, torch.int8):
        raise ValueError(
            f"the cache holds {kv.dtype} and {name} is {x.dtype}; expected the same, or an int8 cache"
        )
