"""Appends operations with recurrent state to a program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import KvPlace
from quintet.executor.backends.cpu.program.values import Value
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan, StatePart


class CColumns(ctypes.Structure):
    """``qt::Columns``: address of a value and its row stride in elements."""

    _fields_ = (("numbers", ctypes.c_void_p), ("stride", ctypes.c_int64))


def columns_of(*values: tuple[int | None, int]) -> ctypes.Array[CColumns]:
    """Pack addresses and strides for the C functions."""
    return (CColumns * len(values))(*(CColumns(*value) for value in values))


class StateOperations:
    """Emits state operations of `quintet.executor.models.forward.ForwardPass`; all values must have memory."""

    def __init__(
        self, library: ProgramLibrary, program: int, place: Callable[[int], KvPlace], code: int
    ) -> None:
        """place: returns the location of a layer's states. code: of the values' dtype."""
        self._library = library
        self._program = program
        self._place = place
        self._code = code

    def causal_conv(self, layer: CausalConv, x: Value, y: Value) -> None:
        """Append a causal convolution."""
        taps, channels = layer.weight.shape
        bias = None if layer.bias is None else layer.bias.data_ptr()
        self._library.causal_conv(
            *(*self._location(layer.state), x.address, x.stride, channels, taps),
            *(layer.weight.data_ptr(), bias, layer.silu, y.address, y.stride, self._code),
        )

    def selective_scan(self, layer: SelectiveScan, values: tuple[Value, ...], y: Value) -> None:
        """Append a scan of channels; values: x, dt, b, c, gate."""
        size, channels = layer.state.shape
        self._library.selective_scan(
            *(*self._location(layer.state), _columns(*values), channels, size),
            *(layer.a.data_ptr(), layer.dt_bias.data_ptr(), layer.skip.data_ptr()),
            *(y.address, y.stride, self._code),
        )

    def head_scan(self, layer: HeadScan, values: tuple[Value | None, ...], y: Value) -> None:
        """Append a scan of heads; values: x, dt, b, c, gate."""
        heads, size, head_dim = layer.state.shape
        self._library.head_scan(
            *(*self._location(layer.state), _columns(*values), heads, head_dim, layer.groups, size),
            *(layer.a.data_ptr(), layer.dt_bias.data_ptr(), layer.skip.data_ptr(), *layer.dt_limits),
            *(y.address, y.stride, self._code),
        )

    def delta_rule(self, layer: DeltaRule, values: tuple[Value, ...], y: Value) -> None:
        """Append the gated delta rule; values: q, k, v, alpha, beta."""
        heads, key_dim, head_dim = layer.state.shape
        self._library.delta_rule(
            *(*self._location(layer.state), _columns(*values), heads, head_dim, layer.key_heads, key_dim),
            *(layer.a.data_ptr(), layer.dt_bias.data_ptr(), y.address, y.stride, self._code),
        )

    def _location(self, state: StatePart) -> tuple[int, object, int]:
        return self._program, ctypes.byref(self._place(state.index)), state.offset


def _columns(*values: Value | None) -> object:
    return columns_of(*((None, 0) if value is None else (value.address, value.stride) for value in values))
