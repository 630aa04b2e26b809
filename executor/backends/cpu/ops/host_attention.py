"""CPU paged attention and KV write: bindings of ``csrc/cpu/attention/attention.cpp`` for bf16, fp16 and fp32 rows.

Owns the cache of a layer (`PagedKv`), the C declarations for eager calls, and the argument checks. A compiled step calls the
same kernels through `quintet.executor.backends.cpu.program.library`. A token's attention has the same bits in every batch and
for every chunking of its prompt.

Quantized caches:

- int8: symmetric, 255 levels, one fp32 scale per head, for keys and for values.
- int4: groups of 32 elements, 16 levels between their minimum and maximum, both fp16.
- fp8: e4m3 of the value divided by the head's scale.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES, NARROW_KV
from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.executor.backends.cpu.program.step import CStep, KvPlace
from quintet.executor.kv_memory import KvMemory
from quintet.executor.memory import lazy_zeros
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.errors import ConfigError

_FP8 = DTYPE_CODES[torch.float8_e4m3fn]
_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class CAttention(ctypes.Structure):
    """Mirror of ``qt::AttentionLayer``, which documents the fields."""

    _fields_ = (
        *((name, _SIZE) for name in ("heads", "kv_heads", "key_width", "value_width", "block_size")),
        *((name, _SIZE) for name in ("window", "chunk", "rope", "rotary", "rotary_first", "interleaved")),
        *((name, _ADDRESS) for name in ("alibi_slopes", "sinks", "q_norm", "k_norm")),
        *((name, _ADDRESS) for name in ("key_scales", "value_scales")),
        ("norms_after_rope", _SIZE),
        *((name, _FLOAT) for name in ("scale", "softcap", "eps", "norm_offset", "growth")),
        *((name, _INT) for name in ("dtype", "kv_dtype")),
        *((name, _SIZE) for name in ("period", "shift", "in_parts", "values_in_keys")),
    )


class AttentionLibrary:
    """C functions; ``csrc/cpu/attention/attention.cpp`` documents the arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library, "qt_attention_layer_bytes", ctypes.sizeof(CAttention))
        a, n, i = _ADDRESS, _SIZE, _INT
        self.block_bytes = declare(library, "qt_kv_block_bytes", i, n, n, n, n, n, result=n)
        self.query_width = declare(library, "qt_query_width", n, result=n)
        self.write_kv = declare(library, "qt_write_kv", a, a, a, n, a, n, a, n, a, a, n)
        self.attend = declare(library, "qt_attend", a, a, a, n, a, a, n)


@cache
def _functions() -> AttentionLibrary:
    library = open_library()
    if library is None:
        raise RuntimeError(
            "the host kernels are not built; check the installation log, or use the torch references"
        )
    return AttentionLibrary(library)


def kv_block_bytes(
    dtype: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    *,
    values_in_keys: bool = False,
) -> int:
    """Return the bytes of one layer's block with keys and values stored as ``dtype``.

    Raises ConfigError if the kernels do not support such blocks.
    """
    heads = (num_kv_heads, head_dim, value_dim)
    size = int(_functions().block_bytes(DTYPE_CODES[dtype], *heads, block_size, values_in_keys))
    if size:
        return size
    if block_size % 16:
        raise ConfigError(
            f"the block size is {block_size} tokens; the CPU backend needs a multiple of 16: set --block-size 16 or 32"
        )
    if values_in_keys and dtype is torch.quint4x2:
        raise ConfigError(
            "the KV cache dtype is int4, which cannot store values that are a prefix of the keys (MLA); use int8"
        )
    raise ConfigError(
        f"head dimensions are {head_dim} (keys) and {value_dim} (values); CPU attention supports at most 576 and 512"
    )


@dataclass(frozen=True, slots=True)
class PagedKv:
    """KV cache of one layer. Initialised to zeros; pages are allocated on the first write."""

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    memory: torch.Tensor
    """uint8 ``[num_blocks, bytes]``, inner layout private to the kernels."""
    values_in_keys: bool = False
    group: int = 0

    @property
    def place(self) -> KvPlace:
        """Descriptor for the kernels."""
        return KvPlace(self.memory.data_ptr(), self.memory.stride(0), self.group, 1, 0, 0)

    @staticmethod
    def of_layer(kv: KvMemory, layer: AttentionLayer) -> PagedKv:
        """Return a layer's part of KV memory. Raises ConfigError, see `kv_block_bytes`."""
        group, place = kv.spec.place(layer.index)
        heads = (layer.num_kv_heads, layer.head_dim, layer.value_width, kv.spec.block_size)
        assert kv_block_bytes(kv.dtype, *heads) <= kv.spec.layer_bytes, heads
        return PagedKv(kv.dtype, *heads, kv.places[place], group=group)

    @staticmethod
    def of_blocks(
        num_blocks: int,
        dtype: torch.dtype,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        value_dim: int | None = None,
        *,
        values_in_keys: bool = False,
    ) -> PagedKv:
        """Reserve ``num_blocks``. Raises ConfigError, see `kv_block_bytes`."""
        value_dim = head_dim if value_dim is None else value_dim
        heads = (num_kv_heads, head_dim, value_dim, block_size)
        size = kv_block_bytes(dtype, *heads, values_in_keys=values_in_keys)
        memory = lazy_zeros((num_blocks, size), torch.uint8, torch.device("cpu"))
        return PagedKv(dtype, *heads, memory, values_in_keys)


def c_attention(layer: AttentionLayer, dtype: torch.dtype, kv_code: int, block_size: int) -> CAttention:
    """Describe a layer with ``dtype`` activations to the kernels; the result points into the layer's tensors.

    kv_code: of the cache's dtype. The kernels apply norms only with `AttentionLayer.norms_with_rotation`.
    """
    norms, temperature = layer.norms_with_rotation, layer.temperature
    _check_vectors(layer)
    for norm in norms or ():
        weight = norm.weight
        if weight is None or weight.dtype is not dtype or weight.shape != (layer.head_dim,):
            actual = "none" if weight is None else f"{weight.dtype}{list(weight.shape)}"
            raise ValueError(
                f"the weight of a norm is {actual}; expected contiguous {dtype}[{layer.head_dim}]"
            )
    if layer.scale <= 0 or (layer.softcap is not None and layer.softcap <= 0):
        raise ValueError(
            f"scale is {layer.scale}, softcap {layer.softcap}; expected scale > 0, and softcap > 0 or None"
        )
    return CAttention(
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        key_width=layer.head_dim,
        value_width=layer.value_width,
        block_size=block_size,
        window=layer.window or 0,
        chunk=layer.chunk or 0,
        rope=layer.rope or 0,
        rotary=layer.rotary_dim,
        rotary_first=layer.rotary_first,
        interleaved=layer.interleaved,
        alibi_slopes=_address(layer.alibi_slopes),
        sinks=_address(layer.sinks),
        q_norm=None if norms is None else _address(norms[0].weight),
        k_norm=None if norms is None else _address(norms[1].weight),
        key_scales=_address(layer.kv_scales.key) if kv_code == _FP8 else None,
        value_scales=_address(layer.kv_scales.value) if kv_code == _FP8 else None,
        norms_after_rope=layer.norms_after_rope,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
        eps=0.0 if norms is None else norms[0].eps,
        norm_offset=0.0 if norms is None else norms[0].offset,
        growth=0.0 if temperature is None else temperature.growth,
        dtype=DTYPE_CODES[dtype],
        kv_dtype=kv_code,
        period=1 if temperature is None else temperature.period,
        shift=0 if temperature is None else temperature.shift,
        in_parts=temperature is not None and not temperature.whole,
        values_in_keys=layer.values_in_keys,
    )


def _check_vectors(layer: AttentionLayer) -> None:
    for name, vector, count in (
        ("alibi_slopes", layer.alibi_slopes, layer.num_heads),
        ("sinks", layer.sinks, layer.num_heads),
        ("kv_scales.key", layer.kv_scales.key, layer.num_kv_heads),
        ("kv_scales.value", layer.kv_scales.value, layer.num_kv_heads),
    ):
        if vector is not None and (
            vector.dtype is not torch.float32 or vector.shape != (count,) or not vector.is_contiguous()
        ):
            raise ValueError(
                f"{name} are {vector.dtype}{list(vector.shape)}; expected contiguous float32[{count}]"
            )


def query_width(head_dim: int) -> int:
    """Return the width of a query head after `write_kv`: ``head_dim`` rounded up to a multiple of 16."""
    return int(_functions().query_width(head_dim))


def write_kv(
    step: CStep,
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKv,
) -> torch.Tensor:
    """Return queries ``[num_tokens, num_heads * query_width]`` for `attend`; write keys and values into ``kv``.

    q: ``[num_tokens, num_heads * head_dim]``; k: ``[num_tokens, num_kv_heads * head_dim]``; v: ``[num_tokens, num_kv_heads *
    value_width]``. They may be columns of one matrix or separate matrices; v is not read with ``layer.values_in_keys``.

    Rounds as `quintet.executor.backends.cpu.ops.rms_norm` and `quintet.executor.backends.cpu.ops.rope_kv_write`, except that
    products with sines are not rounded separately. The step's cosines and sines have the dtype of ``q``.
    """
    width = query_width(layer.head_dim)
    _check(step, layer, "q", q, layer.num_heads * layer.head_dim, kv)
    _check(step, layer, "k", k, layer.num_kv_heads * layer.head_dim, kv)
    _check(step, layer, "v", v, layer.num_kv_heads * layer.value_width, kv)
    out = torch.empty((len(q), layer.num_heads * width), dtype=q.dtype)
    _functions().write_kv(
        *(ctypes.byref(step), ctypes.byref(_c_attention(layer, q, kv))),
        *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(ctypes.byref(kv.place), out.data_ptr(), out.stride(0)),
    )
    return out


def attend(step: CStep, layer: AttentionLayer, q: torch.Tensor, kv: PagedKv) -> torch.Tensor:
    """Return attention outputs ``[num_tokens, num_heads * value_width]``. q: the result of `write_kv`."""
    _check(step, layer, "q", q, layer.num_heads * query_width(layer.head_dim), kv)
    out = torch.empty((len(q), layer.num_heads * layer.value_width), dtype=q.dtype)
    _functions().attend(
        *(ctypes.byref(step), ctypes.byref(_c_attention(layer, q, kv)), q.data_ptr(), q.stride(0)),
        *(ctypes.byref(kv.place), out.data_ptr(), out.stride(0)),
    )
    return out


def _c_attention(layer: AttentionLayer, q: torch.Tensor, kv: PagedKv) -> CAttention:
    return c_attention(layer, q.dtype, DTYPE_CODES[kv.dtype], kv.block_size)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(step: CStep, layer: AttentionLayer, name: str, x: torch.Tensor, width: int, kv: PagedKv) -> None:
    formats = (torch.bfloat16, torch.float16, torch.float32)
    if x.dim() != 2 or x.shape != (step.num_tokens, width) or x.dtype not in formats or x.stride(1) != 1:
        raise ValueError(
            f"{name} is {x.dtype}{list(x.shape)} with strides {x.stride()}; expected [{step.num_tokens}, {width}] of"
            " bfloat16, float16 or float32 with contiguous rows"
        )
    if kv.dtype not in (x.dtype, *NARROW_KV.values()):
        raise ValueError(
            f"the KV cache is {kv.dtype} and {name} is {x.dtype}; expected the same dtype, or an int8, int4 or fp8 cache"
        )
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    if layer.values_in_keys != kv.values_in_keys:
        raise ValueError(
            f"values_in_keys is {layer.values_in_keys} in the layer and {kv.values_in_keys} in the cache; expected the same"
        )
    if heads != (kv.num_kv_heads, kv.head_dim, kv.value_dim):
        raise ValueError(
            f"the layer has {heads[0]} KV heads of dimensions {heads[1]} and {heads[2]}, the cache"
            f" {kv.num_kv_heads} of {kv.head_dim} and {kv.value_dim}"
        )
