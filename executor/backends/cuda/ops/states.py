"""Layers with recurrent state: ``csrc/cuda/states.cu``.

The functions of the same names in `quintet.executor.backends.cpu.ops` are the references and document the operands. States are
``[num_blocks, ...]`` with strided blocks. Rows are those of the state group: the first two entries of a block table row are the
block to read and the block to write. Rows without tokens access no block; padding tokens give zeros.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Argument, Device, Kernel
from quintet.executor.backends.cuda.ops.formats import describe, number_format
from quintet.executor.backends.cuda.tables import StepRows

THREADS = 128
TILE = 8
"""Tokens with inputs in shared memory at a time."""
COLUMNS = 32
"""Columns of a head's state per block."""
PARTS = 4
"""Lanes per column."""

_ROWS = "pppppi"
_SCAN = "plplplplplp"


def causal_conv(
    device: Device,
    rows: StepRows,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    taps, channels = weight.shape
    suffix = _check(rows, states, {"x": (x, channels)}, {"weight": weight, "bias": bias}, x.dtype)
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    tiles = -(-channels // THREADS)
    if rows.num_tokens:
        device.launch(
            Kernel("states", f"causal_conv_{suffix}", f"plppppl{_ROWS}piii"),
            (rows.num_tokens, tiles, 1),
            (THREADS, 1, 1),
            (
                *(x, x.stride(0), out, weight, bias, states, states.stride(0), *_arguments(rows)),
                *(rows.token_rows, channels, taps, int(silu)),
            ),
        )
        device.launch(
            Kernel("states", f"keep_inputs_{suffix}", f"plpl{_ROWS}ii"),
            (tiles, rows.num_rows, 1),
            (THREADS, 1, 1),
            (x, x.stride(0), states, states.stride(0), *_arguments(rows), channels, taps),
        )
    return out


def selective_scan(
    device: Device,
    rows: StepRows,
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
    size, channels = a.shape
    values = {
        "x": (x, channels),
        "dt": (dt, channels),
        "b": (b, size),
        "c": (c, size),
        "gate": (gate, channels),
    }
    suffix = _check(rows, states, values, {"a": a, "dt_bias": dt_bias, "skip": skip})
    out = torch.zeros((len(x), channels), dtype=x.dtype, device=x.device)
    if rows.num_tokens:
        device.launch(
            Kernel("states", f"selective_scan_{suffix}", f"{_SCAN}ppppl{_ROWS}ii"),
            (-(-channels // THREADS), rows.num_rows, 1),
            (THREADS, 1, 1),
            (
                *(*_strided(x, dt, b, c, gate), out, a, dt_bias, skip, states, states.stride(0)),
                *(*_arguments(rows), channels, size),
            ),
            4 * (2 * size * THREADS + 2 * TILE * size),
        )
    return out


def head_scan(
    device: Device,
    rows: StepRows,
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
    _, heads, size, head_dim = states.shape
    groups = b.shape[1] // size
    values = {"x": (x, heads * head_dim), "dt": (dt, heads), "b": (b, groups * size), "c": (c, groups * size)}
    if gate is not None:
        values["gate"] = (gate, heads * head_dim)
    suffix = _check(rows, states, values, {"a": a, "dt_bias": dt_bias, "skip": skip})
    out = torch.zeros((len(x), heads * head_dim), dtype=x.dtype, device=x.device)
    if rows.num_tokens:
        device.launch(
            Kernel("states", f"head_scan_{suffix}", f"{_SCAN}pppffpl{_ROWS}iiii"),
            (heads * -(-head_dim // COLUMNS), rows.num_rows, 1),
            (THREADS, 1, 1),
            (
                *(*_strided(x, dt, b, c, gate), out, a, dt_bias, skip, *dt_limits, states, states.stride(0)),
                *(*_arguments(rows), heads, groups, size, head_dim),
            ),
            _shared_bytes(size),
        )
    return out


def delta_rule(
    device: Device,
    rows: StepRows,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    _, heads, size, head_dim = states.shape
    key_heads = k.shape[1] // size
    values = {
        "q": (q, key_heads * size),
        "k": (k, key_heads * size),
        "v": (v, heads * head_dim),
        "alpha": (alpha, heads),
        "beta": (beta, heads),
    }
    suffix = _check(rows, states, values, {"a": a, "dt_bias": dt_bias})
    out = torch.zeros((len(v), heads * head_dim), dtype=v.dtype, device=v.device)
    if rows.num_tokens:
        device.launch(
            Kernel("states", f"delta_rule_{suffix}", f"{_SCAN}pppl{_ROWS}iiii"),
            (heads * -(-head_dim // COLUMNS), rows.num_rows, 1),
            (THREADS, 1, 1),
            (
                *(*_strided(q, k, v, alpha, beta), out, a, dt_bias, states, states.stride(0)),
                *(*_arguments(rows), heads, key_heads, size, head_dim),
            ),
            _shared_bytes(size),
        )
    return out


def _shared_bytes(size: int) -> int:
    """Return the shared memory of a block: its part of the state, the inputs of a tile, and per-token values."""
    return 4 * (-(-size // PARTS) * PARTS * COLUMNS + 2 * TILE * size + TILE * COLUMNS + 2 * TILE)


def _arguments(rows: StepRows) -> tuple[Argument, ...]:
    return (
        rows.slots,
        rows.starts,
        rows.counts,
        rows.offsets,
        rows.block_table,
        rows.block_table.shape[1],
    )


def _strided(*values: torch.Tensor | None) -> tuple[Argument, ...]:
    return tuple(each for x in values for each in (x, 0 if x is None else x.stride(0)))


def _check(
    rows: StepRows,
    states: torch.Tensor,
    values: dict[str, tuple[torch.Tensor, int]],
    parameters: dict[str, torch.Tensor | None],
    state_dtype: torch.dtype = torch.float32,
) -> str:
    """Return the dtype suffix of the kernel; raise `ValueError` for an unsupported tensor."""
    first = next(x for x, _ in values.values())
    for name, (x, width) in values.items():
        fits = tuple(x.shape) == (rows.num_tokens, width) and (width <= 1 or x.stride(1) == 1)
        if not fits or x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"{name}: expected {first.dtype}{[rows.num_tokens, width]} on {first.device}, rows contiguous, got"
                f" {describe(x)}"
            )
    if states.dtype != state_dtype or not states[0].is_contiguous():
        raise ValueError(f"states: expected {state_dtype}, contiguous within a block, got {describe(states)}")
    for name, parameter in parameters.items():
        if parameter is not None and (parameter.dtype != torch.float32 or not parameter.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous torch.float32, got {describe(parameter)}")
    if rows.block_table.ndim != 2 or rows.block_table.shape[1] < 2 or not rows.block_table.is_contiguous():
        raise ValueError(
            f"block_table: expected contiguous [max_num_seqs, 2 or more], got {describe(rows.block_table)}"
        )
    return number_format(first)
