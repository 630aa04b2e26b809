"""CPU operations with recurrent state: bindings of ``csrc/cpu/ops/states.cpp`` for bf16, fp16 and fp32 rows.

Each function has the signature of its reference (`quintet.executor.backends.cpu.ops.states`, ``selective_scan``,
``head_scan``, ``delta_rule``). Rows and blocks may be strided; their elements are contiguous. A compiled step records the same
kernels as operations (`quintet.executor.backends.cpu.program.library`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.states import StateRows
from quintet.executor.backends.cpu.program.library import STATE_ARGUMENTS
from quintet.executor.backends.cpu.program.values import columns_of

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


@cache
def _functions() -> dict[str, Callable[..., Any]] | None:
    library = open_library()
    if library is None:
        return None
    return {
        name: declare(library, f"qt_op_{name}", _ADDRESS, _SIZE, _SIZE, *arguments)
        for name, arguments in STATE_ARGUMENTS.items()
    }


def causal_conv(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """See `quintet.executor.backends.cpu.ops.states.causal_conv`."""
    channels, taps = x.shape[1], len(weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    parameters = (_parameter(weight, taps, channels), None if bias is None else _parameter(bias, channels))
    address, stride = _columns(x, channels)
    _run(
        *("causal_conv", rows, states, (taps - 1, channels), x.dtype),
        *(address, stride, channels, taps, *parameters, silu, *_out(y)),
    )
    return y


def selective_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
) -> torch.Tensor:
    """See `quintet.executor.backends.cpu.ops.states.selective_scan`."""
    size, channels = a.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = columns_of(
        *(_columns(x, channels), _columns(dt, channels)),
        *(_columns(b, size), _columns(c, size), _columns(gate, channels)),
    )
    parameters = (_parameter(a, size, channels), _parameter(dt_bias, channels), _parameter(skip, channels))
    _run(
        *("selective_scan", rows, states, (size, channels), torch.float32),
        *(columns, channels, size, *parameters, *_out(y)),
    )
    return y


def head_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    dt_limits: tuple[float, float],
) -> torch.Tensor:
    """See `quintet.executor.backends.cpu.ops.states.head_scan`."""
    heads, size, head_dim = states.shape[1:]
    groups, width = b.shape[1] // size, heads * head_dim
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = columns_of(
        *(_columns(x, width), _columns(dt, heads), _columns(b, groups * size), _columns(c, groups * size)),
        (None, 0) if gate is None else _columns(gate, width),
    )
    parameters = (_parameter(a, heads), _parameter(dt_bias, heads), _parameter(skip, heads))
    _run(
        *("head_scan", rows, states, (heads, size, head_dim), torch.float32),
        *(columns, heads, head_dim, groups, size, *parameters, *dt_limits, *_out(y)),
    )
    return y


def delta_rule(
    rows: StateRows,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """See `quintet.executor.backends.cpu.ops.states.delta_rule`."""
    heads, key_dim, head_dim = states.shape[1:]
    keys = k.shape[1]
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    columns = columns_of(
        *(_columns(q, keys), _columns(k, keys), _columns(v, heads * head_dim)),
        *(_columns(alpha, heads), _columns(beta, heads)),
    )
    _run(
        *("delta_rule", rows, states, (heads, key_dim, head_dim), torch.float32),
        *(columns, heads, head_dim, keys // key_dim, key_dim),
        *(_parameter(a, heads), _parameter(dt_bias, heads), *_out(y)),
    )
    return y


def _run(
    name: str,
    rows: StateRows,
    states: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *arguments: Any,
) -> None:
    functions = _functions()
    if functions is None:
        raise RuntimeError(
            "the host kernels are not built; check the installation log, or use the torch references"
        )
    if states.dtype is not dtype or states.shape[1:] != shape or not states[0].is_contiguous():
        raise ValueError(
            f"states are {states.dtype}{list(states.shape)} with strides {states.stride()}; expected {dtype}"
            f"[num_blocks, {', '.join(map(str, shape))}], contiguous within a block"
        )
    block_bytes, begin = states.stride(0) * states.element_size(), states.data_ptr()
    table = torch.stack(
        (
            torch.where(rows.fresh, 0, begin + rows.sources * block_bytes),
            begin + rows.targets * block_bytes,
            rows.offsets,
            rows.counts,
        ),
        dim=1,
    ).contiguous()
    functions[name](table.data_ptr(), len(table), 0, *arguments)


def _columns(x: torch.Tensor, width: int) -> tuple[int, int]:
    """Return address and stride of a matrix with contiguous rows."""
    if x.dim() != 2 or x.dtype not in FLOAT_CODES or x.shape[1] != width or (width > 1 and x.stride(1) != 1):
        raise ValueError(
            f"a value is {x.dtype}{list(x.shape)} with strides {x.stride()}; expected [tokens, {width}] of bfloat16,"
            " float16 or float32 with contiguous rows"
        )
    return x.data_ptr(), x.stride(0)


def _parameter(parameter: torch.Tensor, *shape: int) -> int:
    if parameter.dtype is not torch.float32 or parameter.shape != shape or not parameter.is_contiguous():
        raise ValueError(
            f"a parameter is {parameter.dtype}{list(parameter.shape)}; expected contiguous float32{list(shape)}"
        )
    return parameter.data_ptr()


def _out(y: torch.Tensor) -> tuple[int, int, int]:
    return y.data_ptr(), y.stride(0), FLOAT_CODES[y.dtype]
