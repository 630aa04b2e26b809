"""Records a forward pass: which operation reads and writes what, then where each value lies in memory, then the program.

Values are places of ``[max_rows, width]``. Two values share memory when one is no longer needed before the other is made;
a sum is written over the residual it adds to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from quintet.executor.layers.linear import Embedding, Linear
from quintet.executor.memory import lazy_zeros
from quintet.executor.models.forward import AttentionLayer
from quintet.executor.ops.host_dtypes import FLOAT_CODES
from quintet.executor.program.library import ProgramLibrary


class Extent(IntEnum):
    """What the rows of a value are."""

    TOKENS = 0
    """Every token of the step."""
    OUTPUTS = 1
    """Those whose logits are wanted."""


_PAGE_BYTES, _LINE_BYTES = 4096, 64
"""Rows whose lines would share the sets of a cache, all the first ones one set and so on, are kept a line apart: a kernel reads
many rows side by side."""


@dataclass(eq=False, slots=True)
class Value:
    """A value of the pass being recorded."""

    width: int
    extent: Extent
    tensor: torch.Tensor | None = None
    """Its memory, ``[max_rows, width]``, once places are given out."""

    @property
    def address(self) -> int:
        """Where it begins."""
        assert self.tensor is not None, "no memory yet"
        return self.tensor.data_ptr()

    @property
    def stride(self) -> int:
        """Numbers from a row to the next."""
        assert self.tensor is not None, "no memory yet"
        return self.tensor.stride(0)


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    emit: Callable[[], None]
    reads: tuple[Value, ...]
    writes: Value
    over: Value | None = None
    """A value read for the last time, over which the result is written."""


@dataclass(frozen=True, slots=True)
class Span:
    """A recorded operation's share of the program: one operation or, with quantized weights, two."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV memory of every layer."""

    layers: tuple[torch.Tensor, ...]
    """uint8 ``[num_blocks, bytes]`` each, inner layout private to the kernels."""
    block_size: int
    dtype: int
    """Code of the numbers stored."""


class Recorder:
    """A `quintet.executor.models.forward.ForwardPass` over `Value`."""

    def __init__(
        self, library: ProgramLibrary, dtype: torch.dtype, kv: KvMemory, max_tokens: int, max_outputs: int
    ) -> None:
        """``max_tokens`` and ``max_outputs``: the most rows a step has of each extent."""
        self._library = library
        self._dtype = dtype
        self._code = FLOAT_CODES[dtype]
        self._kv = kv
        self._max_rows = {Extent.TOKENS: max_tokens, Extent.OUTPUTS: max_outputs}
        self._operations: list[_Operation] = []
        self._kept: set[int] = set()
        self._marks: set[int] = set()
        self.memory: list[torch.Tensor] = []
        """What values lie in: must live as long as the program is run."""
        self.handle = library.new()

    def embedding(self, layer: Embedding) -> Value:
        """See `ForwardPass`."""
        y = Value(layer.width, Extent.TOKENS)
        library, code = self._library, self._code
        packed, table = layer.packed, layer.table

        def emit() -> None:
            if packed is not None:
                library.embedding_packed(self.handle, packed.handle, y.address, y.stride, code)
            else:
                assert table is not None, "an embedding has a table or a packed output layer"
                library.embedding(
                    *(self.handle, table.data_ptr(), layer.width, y.address, y.stride),
                    *(code, FLOAT_CODES[table.dtype]),
                )

        return self._append("embedding", emit, (), y)

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        """See `ForwardPass`."""
        y = Value(x.width, x.extent)
        assert weight.dtype is self._dtype and weight.shape == (x.width,) and weight.is_contiguous(), (
            weight.shape
        )

        def emit() -> None:
            self._library.rms_norm(
                *(self.handle, x.address, x.stride, x.width, weight.data_ptr(), eps, 0.0),
                *(y.address, y.stride, self._code, x.extent),
            )

        return self._append("rms_norm", emit, (x,), y)

    def linear(self, layer: Linear, x: Value, residual: Value | None = None) -> Value:
        """See `ForwardPass`."""
        y = Value(layer.width, x.extent)
        method = layer.method
        packed, bias = method.packed, method.bias
        assert packed is not None, "recorded without the host kernels"
        assert x.width == layer.depth, (x.width, layer.depth)

        def emit() -> None:
            self._library.linear(
                *(self.handle, packed.handle, x.address, x.stride, self._max_rows[x.extent], self._code),
                *(None if bias is None else bias.data_ptr(), None if residual is None else residual.address),
                *(y.address, y.stride, layer.activation, method.int8_activations, x.extent),
            )

        reads = (x,) if residual is None else (x, residual)
        return self._append(f"linear {layer.depth} to {layer.width}", emit, reads, y, over=residual)

    def attention(self, layer: AttentionLayer, qkv: Value) -> Value:
        """See `ForwardPass`. Rotation with the KV write, then attention."""
        queries = Value(layer.num_heads * layer.head_dim, Extent.TOKENS)
        y = Value(queries.width, Extent.TOKENS)
        library, kv = self._library, self._kv
        memory = kv.layers[layer.index]
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        norms = tuple(None if norm is None else norm.data_ptr() for norm in (layer.q_norm, layer.k_norm))

        def emit_write() -> None:
            library.rope_kv_write(
                *(self.handle, qkv.address, qkv.stride, *heads, layer.rotary_dim, *norms, layer.norm_eps),
                *(memory.data_ptr(), kv.block_size, queries.address, queries.stride, self._code, kv.dtype),
            )

        def emit_attend() -> None:
            library.attention(
                *(self.handle, queries.address, queries.stride, memory.data_ptr(), *heads, kv.block_size),
                *(layer.window or 0, 0.0, None, layer.scale, y.address, y.stride),
                *(self._max_rows[Extent.TOKENS], self._code, kv.dtype),
            )

        self._append("rotate and write KV", emit_write, (qkv,), queries)
        return self._append("attention", emit_attend, (queries,), y)

    def take_outputs(self, x: Value) -> Value:
        """Return the rows of ``x`` whose logits are wanted."""
        y = Value(x.width, Extent.OUTPUTS)

        def emit() -> None:
            self._library.take_outputs(
                self.handle, x.address, x.stride, x.width, y.address, y.stride, self._code
            )

        return self._append("take outputs", emit, (x,), y)

    @property
    def num_recorded(self) -> int:
        """Operations recorded so far."""
        return len(self._operations)

    def mark(self) -> None:
        """Have each run note when it comes to what is recorded next."""
        self._marks.add(self.num_recorded)

    def keep(self, value: Value) -> None:
        """Never give the memory of ``value`` to another: it is read after the pass."""
        assert all(operation.over is not value for operation in self._operations), (
            "a value that a recorded operation is written over cannot be kept any more"
        )
        self._kept.add(id(value))

    def finish(self) -> list[Span]:
        """Give every value its memory and append the operations to the program. Returns where each recorded one went."""
        spans = []
        last_read = {
            id(value): number
            for number, operation in enumerate(self._operations)
            for value in (operation.writes, *operation.reads)
        }
        free: dict[Extent, list[torch.Tensor]] = {Extent.TOKENS: [], Extent.OUTPUTS: []}
        for number, operation in enumerate(self._operations):
            made = operation.writes
            if operation.over is None:
                made.tensor = self._place(made, free)
            else:
                self._check_overwriting(number, operation.over, last_read[id(operation.over)])
                made.tensor = operation.over.tensor
            for value in operation.reads:
                if value is operation.over or id(value) in self._kept or last_read[id(value)] != number:
                    continue
                assert value.tensor is not None, "read before it was written"
                free[value.extent].append(value.tensor)
            begin = self._library.size(self.handle)
            if number in self._marks:
                self._library.mark(self.handle)
            operation.emit()
            spans.append(Span(operation.name, begin, self._library.size(self.handle)))
        return spans

    def _check_overwriting(self, number: int, over: Value, last_read: int) -> None:
        """See to it that what operation ``number`` is written over is its residual alone, and nobody reads it later."""
        operation = self._operations[number]
        made = next((each.name for each in self._operations[:number] if each.writes is over), "nobody")
        what = f"operation {number}, {operation.name!r}, is written over what {made!r} made"
        assert last_read == number, (
            f"{what}, which operation {last_read}, {self._operations[last_read].name!r}, reads later"
        )
        assert sum(value is over for value in operation.reads) == 1, f"{what}, which it multiplies as well"
        ours, theirs = (operation.writes.width, operation.writes.extent), (over.width, over.extent)
        assert ours == theirs and over.tensor is not None, (
            f"{what}: {theirs[0]} wide, rows {theirs[1].name}; it makes {ours[0]}, rows {ours[1].name}"
        )

    def _place(self, value: Value, free: dict[Extent, list[torch.Tensor]]) -> torch.Tensor:
        candidates = free[value.extent]
        for i, tensor in enumerate(candidates):
            if tensor.shape[1] == value.width and (tensor.is_contiguous() or id(value) not in self._kept):
                return candidates.pop(i)
        between = 0
        if value.width * self._dtype.itemsize % _PAGE_BYTES == 0 and id(value) not in self._kept:
            between = _LINE_BYTES // self._dtype.itemsize
        shape = (self._max_rows[value.extent], value.width + between)
        self.memory.append(lazy_zeros(shape, self._dtype, torch.device("cpu"))[:, : value.width])
        return self.memory[-1]

    def _append(
        self,
        name: str,
        emit: Callable[[], None],
        reads: tuple[Value, ...],
        y: Value,
        over: Value | None = None,
    ) -> Value:
        if over is not None and id(over) in self._kept:
            over = None
        self._operations.append(_Operation(name, emit, reads, y, over))
        return y
