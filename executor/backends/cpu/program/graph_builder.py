"""Builds a program from a forward pass.

The builder records each operation as a call of a library function, with the values that it reads and writes.
`MemoryPlanner` then assigns memory to each value, and each operation appends itself to the program.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quintet.executor.backends.cpu.ops.activation import ACTIVATION_CODES
from quintet.executor.backends.cpu.ops.host_attention import c_attention, query_width
from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES, FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_experts import HostExperts
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.memory_planner import Lifetimes, MemoryPlanner, fuse
from quintet.executor.backends.cpu.program.step import kv_place
from quintet.executor.backends.cpu.program.values import Extent, Operation, Value, columns_of
from quintet.executor.distributed.parallel.operations import RankOperations, SharedRows
from quintet.executor.distributed.parallel.ranks import Ranks, input_place
from quintet.executor.kv_memory import KvMemory
from quintet.executor.lora.adapters import LoraLayer
from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation, NormKind
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.linear import Embedding, GatedActivation, HeadLinear, Linear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan, StatePart


@dataclass(frozen=True, slots=True)
class OpRange:
    """Range of program operations that one recorded operation emits: one, or two with quantized weights."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """Offsets into the program."""

    spans: list[OpRange]
    """One per operation that remains after fusion, in order."""
    parts: list[int]
    """Index of the first operation of each marked part."""


class GraphBuilder:
    """A `quintet.executor.models.forward.ForwardPass` over `Value`."""

    def __init__(
        self,
        library: ProgramLibrary,
        dtype: torch.dtype,
        kv: KvMemory,
        max_tokens: int,
        max_outputs: int,
        ranks: Ranks | None = None,
    ) -> None:
        """max_tokens, max_outputs: row limits of a step, per extent. ranks: given for a tensor-parallel model."""
        self._library = library
        self._dtype = dtype
        self._code = FLOAT_CODES[dtype]
        self._kv = kv
        self._max_rows = {Extent.TOKENS: max_tokens, Extent.OUTPUTS: max_outputs}
        self._operations: list[Operation] = []
        self._kept: set[int] = set()
        self._marks: dict[int, bool] = {}
        self.memory: list[torch.Tensor] = []
        """Memory of the values; must outlive the program."""
        self.expert_layers: list[HostExperts] = []
        """Experts of each mixture-of-experts layer, in order."""
        self.embedded: Value | None = None
        """Result of the embedding; valid until the next operation."""
        self.received_hidden: Value | None = None
        """Hidden states from the previous stage; None in the first stage."""
        self.handle = library.new()
        self._input = partial(input_place, max_tokens, dtype=dtype, ranks=ranks)
        self._ranks = None if ranks is None else RankOperations(ranks, self.handle, dtype, max_tokens)

    def embedding(self, layer: Embedding) -> Value:
        """See `ForwardPass`."""
        self.embedded = y = Value(layer.width, Extent.TOKENS)
        packed, table = layer.packed, layer.table
        if packed is not None:
            return self._record(
                "embedding", self._library.embedding_packed, (packed.handle, y, self._code), y
            )
        assert table is not None, "an embedding has a table or a packed output layer"
        arguments = (table, layer.width, y, self._code, FLOAT_CODES[table.dtype])
        return self._record("embedding", self._library.embedding, arguments, y)

    def from_previous_stage(self, width: int) -> Value:
        """See `ForwardPass`. Its memory is never reused, because other ranks read it too."""
        self.received_hidden = Value(width, Extent.TOKENS, self._input(width))
        self.keep(self.received_hidden)
        return self.received_hidden

    def norm(self, x: Value, norm: Norm) -> Value:
        """See `ForwardPass`."""
        y = Value(x.width, x.extent)
        groups, is_rms = norm.groups(x.width), norm.kind is NormKind.RMS
        vectors = [norm.weight] if is_rms else [norm.weight, norm.bias]
        assert all(vector is None or vector.dtype is self._dtype for vector in vectors), norm
        append = self._library.rms_norm if is_rms else self._library.layer_norm
        arguments = (
            *(x, groups, norm.width, *vectors, norm.is_per_group, norm.eps),
            *(*((norm.offset, norm.rounds_once) if is_rms else ()), y, self._code, x.extent),
        )
        return self._record(f"{norm.kind}_norm", append, arguments, y)

    def linear(self, layer: Linear, x: Value) -> Value:
        """See `ForwardPass`."""
        if layer.shape.is_partial:
            return self._linear_of_ranks(layer, x)
        y = Value(layer.width, x.extent, dtype=layer.shape.result_dtype)
        runs, code = layer.method.runs, self._code_of(y)
        assert runs, "recorded without the host kernels"
        assert x.width == layer.depth, (x.width, layer.depth)
        run_inputs = [x if run.order is None else self._take_columns(x, run.order) for run in runs]
        lora = layer.lora

        def emit(result: Value, residual: Value | None, activation: int) -> None:
            assert residual is None or residual.stride == result.stride, (residual, result)
            begin = 0
            for run, run_input in zip(runs, run_inputs, strict=True):
                packed, bias, width = run.packed, run.bias, run.packed.output_columns
                added = None if residual is None else self.columns(residual, begin, width).address
                self._call(
                    *(self._library.linear, packed.handle, run_input, self._max_rows[x.extent], self._code),
                    *(bias, added, self.columns(result, begin, width)),
                    *(0 if lora else activation, run.inputs, code, x.extent),
                )
                begin += width
            if lora is not None:
                self._add_lora(lora, x, result, activation)

        name = f"linear {layer.depth} to {layer.width}"
        is_plain = layer.activation is GatedActivation.NONE and code == self._code
        emit_alone = partial(emit, y, None, layer.activation)
        reads = tuple(dict.fromkeys([*run_inputs, x] if lora else run_inputs))
        return self._append(name, emit_alone, reads, y, emit_with=emit if is_plain else None)

    def _linear_of_ranks(self, layer: Linear, x: Value) -> Value:
        """Record a row-parallel layer: each rank holds a part of the inputs."""
        y, ranks, lora = Value(layer.width, x.extent), self._ranks, layer.lora
        assert ranks is not None and x.width == layer.depth, (ranks, x.width, layer.depth)
        [kept] = (part.kept_inputs for part in layer.shape.parts)
        whole = x if lora is None or kept is None else self.of_all_ranks(x, kept)

        def emit(result: Value, residual: Value | None, activation: int) -> None:
            assert not activation, activation
            ranks.linear(layer, x, residual, result)
            if lora is not None:
                self._add_lora(lora, whole, result, activation)

        name = f"linear {layer.depth} to {layer.width}, all ranks"
        return self._append(name, partial(emit, y, None, 0), (x, whole), y, emit_with=emit)

    def _add_lora(self, lora: LoraLayer, x: Value, y: Value, activation: int) -> None:
        """Append the adapters of a layer with input ``x`` and result ``y``, then its activation."""
        assert x.extent is Extent.TOKENS, "only layers over all tokens have adapters"
        (a, b), code = lora.handles, self._code_of(y)
        self._call(self._library.lora, a, b, len(b), x, self._max_rows[x.extent], code, y)
        if activation:
            self._call(self._library.activation, activation, y, y.width, y, code, y.extent)

    def _take_columns(self, x: Value, columns: torch.Tensor) -> Value:
        """Gather columns of ``x``. columns: indices, int32 ``[width]``."""
        y = Value(x.width, x.extent)
        assert columns.dtype is torch.int32 and columns.shape == (x.width,), (x, columns)
        arguments = (x, x.width, columns, y, self._code, x.extent)
        return self._record("order of inputs", self._library.take_columns, arguments, y)

    def add(self, x: Value, y: Value) -> Value:
        """See `ForwardPass`. Fused into the layer that computes a summand, if possible."""
        total = Value(x.width, x.extent)
        assert (y.width, y.extent) == (x.width, x.extent), (x, y)
        arguments = (x, y, x.width, total, self._code, x.extent)
        return self._record("add", self._library.add, arguments, total, over=(x, y), sums=(x, y))

    def add_positions(self, x: Value, table: torch.Tensor, offset: int) -> Value:
        """See `ForwardPass`."""
        y = Value(x.width, x.extent)
        assert x.extent is Extent.TOKENS and table.dtype is self._dtype and table.is_contiguous(), (x, table)
        arguments = (x, table, offset, x.width, y, self._code)
        return self._record("add positions", self._library.add_positions, arguments, y, over=(x,))

    def multiply(self, x: Value, y: Value) -> Value:
        """See `ForwardPass`."""
        product = Value(x.width, x.extent)
        assert y.width in (x.width, 1) and y.extent is x.extent, (x, y)
        arguments = (x, y, y.width, x.width, product, self._code, x.extent)
        return self._record("multiply", self._library.multiply, arguments, product, over=(x, y))

    def scale(self, x: Value, factor: float) -> Value:
        """See `ForwardPass`."""
        return self._with_number("scale", self._library.scale, x, factor)

    def clip(self, x: Value, bound: float) -> Value:
        """See `ForwardPass`."""
        return self._with_number("clip", self._library.clip, x, bound)

    def softcap(self, x: Value, cap: float) -> Value:
        """See `ForwardPass`."""
        return self._with_number("softcap", self._library.softcap, x, cap)

    def _with_number(
        self, name: str, append: Callable[..., Any], x: Value, number: float | torch.Tensor
    ) -> Value:
        y = Value(x.width, x.extent, dtype=x.dtype)
        return self._record(name, append, (x, x.width, number, y, self._code_of(y), x.extent), y, over=(x,))

    def activation(self, x: Value, kind: Activation) -> Value:
        """See `ForwardPass`. Fused into the layer that computes ``x``, if no other operation reads ``x``."""
        y, code = Value(x.width, x.extent), ACTIVATION_CODES[kind]
        arguments = (code, x, x.width, y, self._code, x.extent)
        return self._record(kind, self._library.activation, arguments, y, over=(x,), activates=(x, code))

    def xielu(self, x: Value, numbers: torch.Tensor) -> Value:
        """See `ForwardPass`."""
        return self._with_number("xielu", self._library.xielu, x, numbers)

    def columns(self, x: Value, begin: int, width: int) -> Value:
        """See `ForwardPass`."""
        assert begin >= 0 and begin + width <= x.width, (begin, width, x.width)
        return Value(width, x.extent, viewed=x.owner, begin=x.begin + begin, dtype=x.dtype)

    def head_linear(self, layer: HeadLinear, x: Value) -> Value:
        """See `ForwardPass`."""
        y, handles, shape = Value(layer.width, Extent.TOKENS), layer.handles, layer.shape
        assert (x.width, x.extent) == (layer.depth, Extent.TOKENS), (x, layer.depth)
        name = f"{shape.experts} x linear {shape.depth} to {shape.columns}"
        arguments = (handles, len(handles), x, self._max_rows[x.extent], self._code, y)
        return self._record(name, self._library.head_linear, arguments, y)

    def join(self, x: Value, y: Value) -> Value:
        """See `ForwardPass`. Copies both inputs."""
        joined = Value(x.width + y.width, x.extent)
        assert x.extent is y.extent, (x, y)

        def emit() -> None:
            self._copy(x, self.columns(joined, 0, x.width))
            self._copy(y, self.columns(joined, x.width, y.width))

        return self._append("join", emit, (x, y), joined)

    def _copy(self, x: Value, y: Value) -> None:
        self._call(self._library.scale, x, x.width, 1.0, y, self._code, x.extent)

    def experts(self, layer: Experts, x: Value, scores: Value) -> Value:
        """See `ForwardPass`."""
        y = Value(x.width, Extent.TOKENS)
        host = layer.host
        assert host is not None, "recorded without the host kernels"
        assert (x.width, scores.width) == (layer.hidden, layer.routing.experts), (x.width, scores.width)
        assert x.extent is scores.extent is Extent.TOKENS, "experts run on token rows only"
        self.expert_layers.append(host)

        def emit_with(result: Value, residual: Value | None, activation: int) -> None:
            assert self._ranks is not None and not activation, activation
            self._ranks.experts(layer, x, scores, residual, result)

        name = f"{layer.routing.chosen} of {layer.routing.experts} experts"
        if layer.is_partial:
            emit_alone = partial(emit_with, y, None, 0)
            return self._append(f"{name}, all ranks", emit_alone, (x, scores), y, emit_with=emit_with)
        arguments = (host.address, x, scores, self._max_rows[Extent.TOKENS], y, self._code)
        return self._record(name, self._library.experts, arguments, y)

    def attention(self, layer: AttentionLayer, q: Value, k: Value, v: Value) -> Value:
        """See `ForwardPass`. Records RoPE with the KV write, then attention."""
        if layer.norms_with_rotation is None:
            q = q if layer.q_norm is None else self.norm(q, layer.q_norm)
            k = k if layer.k_norm is None else self.norm(k, layer.k_norm)
        widths = (
            layer.num_heads * layer.head_dim,
            layer.num_kv_heads * layer.head_dim,
            layer.num_kv_heads * layer.value_width,
        )
        assert (q.width, k.width, v.width) == widths, (q.width, k.width, v.width, widths)
        queries = Value(layer.num_heads * query_width(layer.head_dim), Extent.TOKENS)
        y = Value(layer.num_heads * layer.value_width, Extent.TOKENS)
        library, kv, max_rows = self._library, self._kv, self._max_rows[Extent.TOKENS]
        context_ranks = None if kv.stripe.is_alone else self._ranks
        if context_ranks is not None:
            queries.place = context_ranks.queries(queries.width)
            self.keep(queries)
        place = kv_place(kv, layer.index)
        c_layer = c_attention(layer, self._dtype, DTYPE_CODES[kv.dtype], kv.spec.block_size)
        c_layer_address, place_address = ctypes.byref(c_layer), ctypes.byref(place)

        def emit_write() -> None:
            self._call(library.rope_kv_write, c_layer_address, q, k, v, place_address, queries)
            if context_ranks is not None:
                context_ranks.barrier(Extent.TOKENS)

        def emit_attend() -> None:
            if context_ranks is not None:
                context_ranks.attention(c_layer, queries, place, y)
            else:
                self._call(library.attention, c_layer_address, queries, place_address, y, max_rows)

        self._append("rotate and write KV", emit_write, (q, k, v), queries)
        return self._append("attention", emit_attend, (queries,), y)

    def causal_conv(self, layer: CausalConv, x: Value) -> Value:
        """See `ForwardPass`."""
        taps, channels = layer.weight.shape
        assert x.width == channels, (x.width, layer.weight.shape)
        arguments = (x, channels, taps, layer.weight, layer.bias, layer.silu)
        return self._record_state("causal_conv", layer.state, arguments, Value(x.width, Extent.TOKENS))

    def selective_scan(
        self, layer: SelectiveScan, x: Value, dt: Value, b: Value, c: Value, gate: Value
    ) -> Value:
        """See `ForwardPass`."""
        size, channels = layer.state.shape
        arguments = ((x, dt, b, c, gate), channels, size, layer.a, layer.dt_bias, layer.skip)
        return self._record_state("selective_scan", layer.state, arguments, Value(x.width, Extent.TOKENS))

    def head_scan(
        self, layer: HeadScan, x: Value, dt: Value, b: Value, c: Value, gate: Value | None
    ) -> Value:
        """See `ForwardPass`."""
        heads, size, head_dim = layer.state.shape
        parameters = (layer.a, layer.dt_bias, layer.skip)
        arguments = ((x, dt, b, c, gate), heads, head_dim, layer.groups, size, *parameters, *layer.dt_limits)
        return self._record_state("head_scan", layer.state, arguments, Value(x.width, Extent.TOKENS))

    def delta_rule(self, layer: DeltaRule, q: Value, k: Value, v: Value, alpha: Value, beta: Value) -> Value:
        """See `ForwardPass`."""
        heads, key_dim, head_dim = layer.state.shape
        sizes = (heads, head_dim, layer.key_heads, key_dim)
        arguments = ((q, k, v, alpha, beta), *sizes, layer.a, layer.dt_bias)
        return self._record_state("delta_rule", layer.state, arguments, Value(v.width, Extent.TOKENS))

    def _record_state(self, name: str, state: StatePart, arguments: tuple[Any, ...], y: Value) -> Value:
        """Record an operation with a recurrent state: the arguments between its location and the result."""
        place = ctypes.byref(kv_place(self._kv, state.index, state=True))
        whole = (place, state.offset, *arguments, y, self._code)
        return self._record(name, getattr(self._library, name), whole, y)

    def take_outputs(self, x: Value) -> Value:
        """Return the rows of ``x`` that need logits."""
        y = Value(x.width, Extent.OUTPUTS)
        return self._record("take outputs", self._library.take_outputs, (x, x.width, y, self._code), y)

    def gather_logits(self, logits: Value) -> Value:
        """Return the logits of all ranks. Each rank writes its columns directly into shared memory, before a barrier."""
        ranks = self._ranks
        assert ranks is not None, "a single rank has all logits"
        dtype = logits.dtype or self._dtype
        place = ranks.logits(dtype)
        whole = Value(place.shape[1], Extent.OUTPUTS, place, dtype=logits.dtype)
        logits.place = ranks.own_columns(place)
        assert logits.place.shape[1] == logits.width and logits.viewed is None, (logits, place.shape)
        self.keep(logits)
        row_bytes, stride = (width * dtype.itemsize for width in (logits.width, whole.stride))
        left = SharedRows(logits.place.data_ptr(), row_bytes, stride, for_first=True)
        return self._append(
            "logits of all ranks", partial(ranks.barrier, Extent.OUTPUTS, left), (logits,), whole
        )

    def of_all_ranks(self, x: Value, kept: KeptRange) -> Value:
        """See `ForwardPass`. Each rank writes its columns into one of two shared buffers that alternate."""
        ranks = self._ranks
        assert ranks is not None and x.extent is Extent.TOKENS and x.width == kept.count, (x, kept)
        whole = Value(kept.whole, x.extent, ranks.next_gathered(kept.whole))
        self.keep(whole)

        def emit() -> None:
            item_bytes = self._dtype.itemsize
            own = self.columns(whole, kept.begin, kept.count)
            self._copy(x, own)
            ranks.barrier(x.extent, SharedRows(own.address, x.width * item_bytes, own.stride * item_bytes))

        return self._append(f"gather {kept.whole} columns of all ranks", emit, (x,), whole)

    def mark(self, *, is_timed: bool = True) -> None:
        """Begin a part that runs separately. A run records the time of its start, if ``is_timed``. Keep values that it reads."""
        self._marks[len(self._operations)] = is_timed

    def keep(self, *values: Value) -> None:
        """Reserve the memory of values that are read after the pass, or by a later part."""
        self._kept.update(id(value.owner) for value in values)

    def finish(self) -> RecordedGraph:
        """Assign memory to every value and append the operations to the program."""
        self._check_parts()
        operations = fuse(self._operations, self._kept, self._marks)
        planner = MemoryPlanner(self._dtype, self._max_rows, self._kept, Lifetimes(operations))
        spans, parts = [], []
        for number, operation in enumerate(operations):
            begin = self._library.size(self.handle)
            if number in self._marks:
                parts.append(begin)
                if self._marks[number]:
                    self._library.mark(self.handle)
            if operation is not None:
                planner.assign(number, operation)
                operation.emit()
                spans.append(OpRange(operation.name, begin, self._library.size(self.handle)))
        self.memory = planner.memory
        return RecordedGraph(spans, parts)

    def _code_of(self, value: Value) -> int:
        return self._code if value.dtype is None else FLOAT_CODES[value.dtype]

    def _check_parts(self) -> None:
        producers = {id(operation.writes): number for number, operation in enumerate(self._operations)}
        for number, operation in enumerate(self._operations):
            for value in operation.reads:
                producer = producers.get(id(value.owner), number)
                is_same_part = all(not producer < mark <= number for mark in self._marks)
                assert is_same_part or id(value.owner) in self._kept, (
                    f"operation {number}, {operation.name!r}, reads a value of an earlier part that was not kept"
                )

    def _record(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        y: Value,
        **fusion: Any,
    ) -> Value:
        """Record a call, see `_call`; it reads the values among the arguments, except its result ``y``.

        fusion: further fields of `Operation`.
        """
        flat = [value for each in arguments for value in (each if isinstance(each, tuple) else (each,))]
        reads = tuple(each for each in flat if isinstance(each, Value) and each is not y)
        emit = partial(self._call, function, *arguments)
        return self._append(name, emit, reads, y, **fusion)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Append an operation.

        A value stands for its address and stride, a tuple of values for an array of both, a tensor for its address.
        """
        places: list[Any] = []
        for each in arguments:
            match each:
                case Value():
                    places += (each.address, each.stride)
                case tuple():
                    places.append(columns_of(*((v.address, v.stride) if v else (None, 0) for v in each)))
                case torch.Tensor():
                    places.append(each.data_ptr())
                case _:
                    places.append(each)
        function(self.handle, *places)

    def _append(
        self, name: str, emit: Callable[[], None], reads: tuple[Value, ...], y: Value, **fusion: Any
    ) -> Value:
        self._operations.append(Operation(name, emit, reads, y, **fusion))
        return y
