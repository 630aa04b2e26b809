"""Fused QK norm, RoPE and KV write in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import (
    PACK_BYTES,
    SUFFIXES,
    Planes,
    are_in_keys,
    check_planes,
    check_vector,
    describe,
    number_format,
)
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.model_config.spec import Temperature

THREADS = 128
MAX_SINGLE_LANES, MAX_SINGLE_ITEMS = 32, 8
MAX_HEAD_DIM = 576

_KERNELS = {
    (in_packs, dtype, is_fp8): Kernel(
        "rope_kv",
        f"rope_kv{'' if in_packs else '_single'}_{suffix}{'_fp8kv' if is_fp8 else ''}",
        "plplplplppppfppiiiiilliiff",
    )
    for in_packs in (True, False)
    for dtype, suffix in SUFFIXES.items()
    for is_fp8 in (False, True)
}
_PLAIN_KERNELS = {
    (dtype, is_fp8): Kernel(
        "rope_kv_plain",
        f"rope_kv_plain_{suffix}{'_fp8kv' if is_fp8 else ''}",
        "plplplpppppffppppiiiiiiilifiiiff",
    )
    for dtype, suffix in SUFFIXES.items()
    for is_fp8 in (False, True)
}


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Parameters of the transform of query and key heads."""

    q_norm: torch.Tensor | None = None
    """``[head_dim]``; both norms are given or neither is."""
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0
    """Added to the norm weights."""
    rotary_first: int = 0
    """First rotated dimension."""
    interleaved: bool = False
    """True if RoPE pairs are adjacent dimensions."""
    temperature: Temperature | None = None
    """Scaling of queries by position."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """Keys and values are divided by these before quantization to fp8."""

    @property
    def is_default(self) -> bool:
        """True if the register kernels support the transform."""
        return not (self.norm_offset or self.rotary_first or self.interleaved or self.temperature)


DEFAULT = HeadTransform()


def rope_kv(
    device: Device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv: Planes,
    rows: StepRows,
    transform: HeadTransform = DEFAULT,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rotated queries ``[num_tokens, num_heads, head_dim]`` and write keys and values into ``kv``.

    - q: ``[num_tokens, num_heads, head_dim]``; k, v: ``[num_tokens, num_kv_heads, head_dim or value_dim]``. Heads of a token are
      contiguous, tokens may be strided. out: like ``q``; may be ``q`` if the transform is default.
    - cos, sin: ``[num_tokens, rotary_dim]`` or ``[num_tokens, 1, rotary_dim]``, the same dtype, as from
      `quintet.executor.models.layers.rope`. Only the first half is read, because both halves are equal. None: no rotation.
    - kv: keys and values, of the same dtype or float8_e4m3fn. fp8 stores the value divided by the scale, saturating at 448.
      Values that are a prefix of the keys are not written separately.

    Padding tokens write no KV, and their queries are zeros. A token's bits depend only on that token. In bf16 and fp16 they
    equal the reference's, except for the order of summation in a norm. In fp32 the last product and sum are fused.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    rotary_dim = 0 if cos is None else cos.shape[-1]
    if device.checks_arguments:
        _check(q, k, v, (cos, sin), kv, rows, transform, out)
    if not (num_tokens := q.shape[0]):
        return out
    keys, values = kv
    heads = (q, q.stride(0), k, k.stride(0), v, v.stride(0), out)
    norms = (transform.q_norm, transform.k_norm, transform.eps)
    num_heads, (num_kv_heads, head_dim), value_dim = q.shape[1], k.shape[1:], v.shape[2]
    in_keys, is_fp8 = are_in_keys(keys, values), keys.dtype == torch.float8_e4m3fn
    num_all = num_heads + (1 if in_keys else 2) * num_kv_heads
    variant = _variant(PACK_BYTES // q.element_size(), head_dim, rotary_dim)
    if variant is not None and transform.is_default and head_dim == value_dim and not in_keys:
        in_packs, lanes = variant
        plane = (values.data_ptr() - keys.data_ptr()) // keys.element_size()
        device.launch(
            _KERNELS[in_packs, q.dtype, is_fp8],
            (-(-num_tokens * num_all * lanes // THREADS), 1, 1),
            (THREADS, 1, 1),
            (
                *(*heads, out.stride(0), cos, sin, *norms, keys, rows.kv_rows),
                *(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim),
                *(plane, keys.stride(0), rows.block_size, lanes, *transform.kv_scales),
            ),
        )
        return out
    temperature = transform.temperature or Temperature(0.0, 1)
    device.launch(
        _PLAIN_KERNELS[q.dtype, is_fp8],
        (num_tokens, num_all, 1),
        (THREADS, 1, 1),
        (
            *(*heads, cos, sin, *norms, transform.norm_offset, keys, values, rows.kv_rows, rows.positions),
            *(num_heads, num_kv_heads, head_dim, value_dim),
            *(rotary_dim, transform.rotary_first, int(transform.interleaved)),
            *(keys.stride(0), rows.block_size),
            *(temperature.growth, temperature.period, temperature.shift, int(not temperature.whole)),
            *transform.kv_scales,
        ),
    )
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: tuple[torch.Tensor | None, torch.Tensor | None],
    kv: Planes,
    rows: StepRows,
    transform: HeadTransform,
    out: torch.Tensor,
) -> None:
    """Raise `ValueError` for an unsupported tensor; a kernel would access other memory."""
    number_format(q)
    keys, values = kv
    if any(plane.ndim != 4 or plane.dtype not in (q.dtype, torch.float8_e4m3fn) for plane in (keys, values)):
        raise ValueError(
            f"kv: expected {q.dtype} or torch.float8_e4m3fn, [num_blocks, num_kv_heads, block_size, width] each,"
            f" got {describe(keys)} and {describe(values)}"
        )
    _, num_kv_heads, block_size, head_dim = keys.shape
    value_dim, num_heads = values.shape[3], q.shape[1] if q.ndim == 3 else 0
    check_planes(kv, keys.dtype, (num_kv_heads, block_size), (head_dim, value_dim))
    for name, heads, shape in (
        ("q", q, (num_heads, head_dim)),
        ("k", k, (num_kv_heads, head_dim)),
        ("v", v, (num_kv_heads, value_dim)),
    ):
        _check_heads(name, heads, q.dtype, (len(q), *shape))
    _check_tables(q, *angles, transform.rotary_first)
    if rows.kv_rows is None or rows.num_tokens != len(q) or rows.block_size != block_size:
        raise ValueError(
            f"rows: expected kv_rows of {len(q)} tokens in blocks of {block_size}, got {rows.num_tokens} in"
            f" blocks of {rows.block_size}, {'without' if rows.kv_rows is None else 'with'} kv_rows"
        )
    if (transform.q_norm is None) != (transform.k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither, got one")
    for name, weight in (("q_norm", transform.q_norm), ("k_norm", transform.k_norm)):
        if weight is not None:
            check_vector(name, weight, q)
    _check_heads("out", out, q.dtype, q.shape)
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected at most {MAX_HEAD_DIM}, got {head_dim} and {value_dim}")
    if not transform.is_default and not out.is_contiguous():
        raise ValueError(f"out: expected contiguous unless the transform is default, got {describe(out)}")


def _check_heads(
    name: str, heads: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | torch.Size
) -> None:
    fits = tuple(heads.shape) == tuple(shape) and heads.dtype == dtype
    is_contiguous = fits and heads.stride()[1:] == (shape[2], 1)
    row_bytes = heads.stride(0) * heads.element_size() if len(heads) > 1 else 0
    packs = shape[2] * heads.element_size() % PACK_BYTES == 0
    if not is_contiguous or (packs and (heads.data_ptr() % PACK_BYTES or row_bytes % PACK_BYTES)):
        raise ValueError(
            f"{name}: expected {dtype}{list(shape)}, contiguous heads of a token, tokens aligned to {PACK_BYTES} bytes,"
            f" got {describe(heads)}"
        )


def _check_tables(q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, first: int) -> None:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos and sin: expected both or neither, got one")
        return
    rotary_dim = cos.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.numel() == len(q) * rotary_dim and table.is_contiguous()
        if not fits or table.dtype != q.dtype or table.data_ptr() % PACK_BYTES:
            raise ValueError(
                f"{name}: expected contiguous {q.dtype}[{len(q)}, rotary_dim], got {describe(table)}"
            )
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[2] - first:
        raise ValueError(
            f"rotary_dim: expected an even number up to {q.shape[2]} - {first}, got {rotary_dim}"
        )


def _variant(pack: int, head_dim: int, rotary_dim: int) -> tuple[bool, int] | None:
    """Select the kernel by the head's shape: whether it uses packs, and the number of lanes per head.

    None: the head is too wide for the registers of a warp.
    """
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    if half % pack == 0 and rest % pack == 0:
        items = half // pack + -(-rest // (2 * pack))
        if items <= MAX_SINGLE_LANES:
            return True, 1 << (items - 1).bit_length()
    items = half + -(-rest // 2)
    return None if items > MAX_SINGLE_LANES * MAX_SINGLE_ITEMS else (False, MAX_SINGLE_LANES)
