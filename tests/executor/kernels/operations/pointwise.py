"""CPU pointwise operations: bindings of ``csrc/cpu/ops/pointwise.cpp`` for bf16, fp16 and fp32 rows.

Owns the declarations of the eager functions (``op``) and of the operations of a compiled step (``program``), and the checks of
the former's tensors. Rows may be strided; the elements of a row are contiguous. ``y`` may be the input. Results are rounded at
the points at which the references (torch, transformers) round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from quintet.executor.backends.cpu.ops.activation import ACTIVATION_CODES
from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.model_config.spec import Activation

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_X, _Y = (_ADDRESS, _SIZE), (_ADDRESS, _SIZE, _INT)  # address and stride; and the format

_SIGNATURES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "rms_norm": (_X, (_SIZE, _SIZE, _ADDRESS, _INT, _FLOAT, _FLOAT, _INT, *_Y)),
    "layer_norm": (_X, (_SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT, _FLOAT, *_Y)),
    "add": ((*_X, *_X), (_SIZE, *_Y)),
    "multiply": ((*_X, *_X, _SIZE), (_SIZE, *_Y)),
    "scale": (_X, (_SIZE, _FLOAT, *_Y)),
    "clip": (_X, (_SIZE, _FLOAT, *_Y)),
    "softcap": (_X, (_SIZE, _FLOAT, *_Y)),
    "xielu": (_X, (_SIZE, _ADDRESS, *_Y)),
    "take_columns": (_X, (_SIZE, _ADDRESS, *_Y)),
    "activation": ((_INT, *_X), (_SIZE, *_Y)),
    "activation_and_mul": ((_INT, *_X), (_SIZE, *_Y)),
}
"""Arguments before and after the number of rows. A program's operation has an extent as last argument instead."""


@dataclass(frozen=True, slots=True)
class PointwiseFunctions:
    """C functions by their names without the prefix ``qt_op_`` or ``qt_program_``."""

    op: dict[str, Callable[..., Any]]
    program: dict[str, Callable[..., Any]]


@cache
def pointwise_functions() -> PointwiseFunctions | None:
    """Declare the functions; None if the library is not built."""
    library = open_library()
    if library is None:
        return None
    op = {
        "embedding": declare(
            library, "qt_op_embedding", _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE, _INT, _INT
        ),
        "add_positions": declare(
            library, "qt_op_add_positions", *_X, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, *_Y
        ),
        "take_rows": declare(library, "qt_op_take_rows", *_X, _SIZE, _ADDRESS, _SIZE, *_Y),
    }
    program = {
        "embedding": declare(
            library, "qt_program_embedding", _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _INT, _INT
        ),
        "add_positions": declare(
            library, "qt_program_add_positions", _ADDRESS, *_X, _ADDRESS, _SIZE, _SIZE, *_Y
        ),
        "take_outputs": declare(library, "qt_program_take_outputs", _ADDRESS, *_X, _SIZE, *_Y),
    }
    for name, (before, after) in _SIGNATURES.items():
        op[name] = declare(library, f"qt_op_{name}", *before, _SIZE, *after)
        program[name] = declare(library, f"qt_program_{name}", _ADDRESS, *before, *after, _INT)
    return PointwiseFunctions(op, program)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    groups: int = 1,
    rounds_once: bool = False,
) -> torch.Tensor:
    """Return ``x / rms(x) * (offset + weight)``. The quotient is rounded first, unless ``offset`` or ``rounds_once``.

    x: ``[rows, width]``; each of its ``groups`` is normalised separately. weight: ``[width]``, or ``[width / groups]`` for all.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes, parameters, per_group = _grouped(x, groups, weight=weight)
    _op("rms_norm")(*_rows(x), len(x), *sizes, *parameters, per_group, eps, offset, rounds_once, *_out(y))
    return y


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, groups: int = 1
) -> torch.Tensor:
    """Return ``(x - mean) / deviation * weight + bias`` (Ba et al., "Layer normalization", 2016), rounded once.

    Shapes as in `rms_norm`; bias: like weight.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes, parameters, per_group = _grouped(x, groups, weight=weight, bias=bias)
    _op("layer_norm")(*_rows(x), len(x), *sizes, *parameters, per_group, eps, *_out(y))
    return y


def add(x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``x + second``, both ``[rows, width]``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _like(x, "second", second, x.shape)
    _op("add")(*_rows(x), *_rows(second), len(x), x.shape[1], *_out(y))
    return y


def multiply(x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``x * second``; second: ``[rows, width]`` like ``x``, or ``[rows, 1]``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = second.shape[-1]
    _like(x, "second", second, (len(x), 1 if width == 1 else x.shape[1]))
    _op("multiply")(*_rows(x), *_rows(second), width, len(x), x.shape[1], *_out(y))
    return y


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x * factor``; factor: fp32, not rounded to the dtype of ``x``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _op("scale")(*_rows(x), len(x), x.shape[1], factor, *_out(y))
    return y


def clip(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Clamp ``x`` to ``[-bound, bound]``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _op("clip")(*_rows(x), len(x), x.shape[1], bound, *_out(y))
    return y


def softcap(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Return ``tanh(x / bound) * bound``, rounded after each operation."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _op("softcap")(*_rows(x), len(x), x.shape[1], bound, *_out(y))
    return y


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """See `quintet.executor.backends.cpu.ops.activation.xielu`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if numbers.dtype is not torch.float32 or numbers.shape != (4,) or not numbers.is_contiguous():
        raise ValueError(f"numbers are {numbers.dtype}{list(numbers.shape)}; expected contiguous float32[4]")
    _op("xielu")(*_rows(x), len(x), x.shape[1], numbers.data_ptr(), *_out(y))
    return y


def activation(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    """Apply the activation elementwise."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _op("activation")(ACTIVATION_CODES[kind], *_rows(x), len(x), x.shape[1], *_out(y))
    return y


def activation_and_mul(kind: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``activation(gate) * up``, the activation rounded first; gate_up: ``[rows, 2 * width]``."""
    if gate_up.dim() == 2 and gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up is {list(gate_up.shape)}; expected an even number of columns: [rows, 2 * width]"
        )
    address = _rows(gate_up)
    y = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype)
    _op("activation_and_mul")(ACTIVATION_CODES[kind], *address, len(y), y.shape[1], *_out(y))
    return y


def embedding(token_ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of ``table [vocab, width]`` in ``dtype``; token_ids: int32, not checked against the vocabulary."""
    if token_ids.dtype is not torch.int32 or token_ids.dim() != 1 or not table.is_contiguous():
        raise ValueError(
            f"token_ids are {token_ids.dtype}{list(token_ids.shape)}, the table has strides {table.stride()};"
            " expected int32[rows] and a contiguous table"
        )
    _rows(table)
    token_ids = token_ids.contiguous()
    y = torch.empty((len(token_ids), table.shape[1]), dtype=dtype)
    _op("embedding")(
        *(table.data_ptr(), token_ids.data_ptr(), len(y), y.shape[1]),
        *(*_out(y), FLOAT_CODES[table.dtype]),
    )
    return y


def add_positions(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, first: int) -> torch.Tensor:
    """Return ``x + table[positions + first]``; positions: int64, not checked against the table."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _like(x, "table", table, (len(table), x.shape[1]))
    if positions.dtype is not torch.int64 or positions.shape != (len(x),) or not table.is_contiguous():
        raise ValueError(
            f"positions are {positions.dtype}{list(positions.shape)}, the table has strides {table.stride()};"
            f" expected int64[{len(x)}] and a contiguous table"
        )
    positions = positions.contiguous()
    _op("add_positions")(
        *(*_rows(x), table.data_ptr(), positions.data_ptr(), first, len(x), x.shape[1], *_out(y))
    )
    return y


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``x[rows]``; rows: int64, not checked."""
    y = torch.empty((len(rows), x.shape[1]), dtype=x.dtype)
    if rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}; expected int64[count]")
    rows = rows.contiguous()
    _op("take_rows")(*_rows(x), x.shape[1], rows.data_ptr(), len(y), *_out(y))
    return y


def take_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return ``x[:, columns]``; columns: int32, not checked."""
    if columns.dtype is not torch.int32 or columns.dim() != 1 or not columns.is_contiguous():
        raise ValueError(
            f"columns are {columns.dtype}{list(columns.shape)}; expected int32[count], contiguous"
        )
    y = torch.empty((len(x), len(columns)), dtype=x.dtype)
    _op("take_columns")(*_rows(x), len(x), len(columns), columns.data_ptr(), *_out(y))
    return y


def _op(name: str) -> Callable[..., Any]:
    functions = pointwise_functions()
    if functions is None:
        raise RuntimeError(
            "the host kernels are not built; check the installation log, or use the torch references"
        )
    return functions.op[name]


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Return address and stride of a matrix with contiguous rows."""
    if x.dim() != 2 or x.dtype not in FLOAT_CODES or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} with strides {x.stride()}; expected [rows, width] of bfloat16, float16 or"
            " float32 with contiguous rows"
        )
    return x.data_ptr(), x.stride(0)


def _out(y: torch.Tensor) -> tuple[int, int, int]:
    return y.data_ptr(), y.stride(0), FLOAT_CODES[y.dtype]


def _grouped(
    x: torch.Tensor, groups: int, **vectors: torch.Tensor | None
) -> tuple[tuple[int, int], list[int | None], bool]:
    """Return groups and their width, the vectors' addresses, and whether the vectors are as wide as the rows of ``x``."""
    width = x.shape[1] // groups
    if width * groups != x.shape[1]:
        raise ValueError(f"x is {list(x.shape)}; expected a width divisible by {groups} groups")
    per_group = any(vector is not None and vector.shape != (width,) for vector in vectors.values())
    for name, vector in vectors.items():
        if vector is not None:
            _like(x, name, vector, x.shape[1:] if per_group else (width,))
            if not vector.is_contiguous():
                raise ValueError(f"{name} has stride {vector.stride()}; expected a contiguous vector")
    addresses = [None if vector is None else vector.data_ptr() for vector in vectors.values()]
    return (groups, width), addresses, per_group


def _like(x: torch.Tensor, name: str, other: torch.Tensor, shape: tuple[int, ...]) -> None:
    if other.dtype is not x.dtype or other.shape != shape:
        raise ValueError(
            f"{name} is {other.dtype}{list(other.shape)}; expected {x.dtype}{list(shape)} for x {list(x.shape)}"
        )
