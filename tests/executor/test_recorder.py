"""The graph builder of a forward pass: fused operations and memory reuse change no value."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from quintet.executor.backends.cpu.ops.activation import activate
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.program.graph_builder import GraphBuilder
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.memory_planner import Lifetimes, MemoryPlanner
from quintet.executor.backends.cpu.program.step import CStep
from quintet.executor.backends.cpu.program.values import Extent, Operation, Value
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.packed import packed_by_part
from quintet.executor.checkpoints.quant.packed_formats import PackedFormat
from quintet.executor.checkpoints.quant.registry import open_quantization
from quintet.executor.checkpoints.quant.stack import StackMethod, StackPiece, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.experts import Routing, Scoring
from quintet.executor.model_config.spec import Activation, NormKind
from quintet.executor.models.layers.experts import Experts, Gate
from quintet.executor.models.layers.linear import GatedActivation, Linear, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.wire.kv_spec import full_layers

pytestmark = pytest.mark.skipif(program_library() is None, reason="the host kernels are not built")

DTYPE = torch.bfloat16
ROWS = 8


@pytest.fixture
def recorder() -> GraphBuilder:
    library = program_library()
    assert library is not None
    return GraphBuilder(
        library, DTYPE, KvMemory(full_layers(1, 1, 8, 2, 16), (), DTYPE), max_tokens=ROWS, max_outputs=4
    )


def linear(
    columns: int,
    depth: int,
    activation: GatedActivation = GatedActivation.NONE,
    seed: int = 0,
    quantization: str = "none",
) -> Linear:
    plan = WeightPlan(DTYPE, torch.device("cpu"))
    shape = LinearShape((RowRange("layer", columns),), depth, activation=activation)
    layer = Linear(open_quantization(quantization), plan, shape)
    plan.reservation = reserve(plan.stores)
    assert layer.method.packed is not None
    layer.method.packed.fill(noise(columns, depth, seed=seed) / depth**0.5)
    return layer


class MixedQuantization:
    """A layer of several parts: the second in 8 bits, the others in bf16."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        library = linear_library()
        assert library is not None
        numbers = [
            PackedFormat(WeightFormat.INT8 if i == 1 else WeightFormat.BF16) for i in range(len(shape.parts))
        ]
        return packed_by_part(library, shape, plan, numbers, shape.sources)

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        return None

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        return True

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        raise NotImplementedError


def linear_of_parts(widths: list[int], depth: int) -> Linear:
    plan = WeightPlan(DTYPE, torch.device("cpu"))
    parts = [RowRange(f"part {i}", width) for i, width in enumerate(widths)]
    layer = Linear(MixedQuantization(), plan, LinearShape(parts, depth, biased=True))
    plan.reservation = reserve(plan.stores)
    for seed, expected in enumerate(plan.expected.values()):
        for sink in (*expected.sinks, *expected.packers):
            sink(noise(*expected.shape, seed=seed) / depth**0.5)
    return layer


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def norm(width: int = 32) -> Norm:
    return Norm(kind=NormKind.RMS, width=width, eps=1e-6, weight=noise(width, seed=9))


def input_value(width: int = 32, seed: int = 1) -> Value:
    """Return an input value of the program."""
    return Value(width, Extent.TOKENS, noise(ROWS, width, seed=seed))


def run(recorder: GraphBuilder) -> list[str]:
    """Finish and run the program; return the names of its operations."""
    spans = recorder.finish().spans
    step = CStep(num_tokens=ROWS, num_rows=1, num_outputs=0)
    recorder._library.run(recorder.handle, ctypes.byref(step), 0, spans[-1].end)
    return [span.name for span in spans]


def test_parts_of_a_layer_write_columns_of_one_result(recorder: GraphBuilder) -> None:
    layer, x, residual = linear_of_parts([9, 6, 14, 3], 32), input_value(), input_value(seed=2)
    y = recorder.linear(layer, x)
    total = recorder.add(residual, recorder.linear(layer, x))
    for value in (x, y, total):
        recorder.keep(value)
    terms = residual.tensor.clone().split([9, 6, 17], 1)  # the sum overwrites it
    names = run(recorder)
    assert names == ["linear 32 to 32", "linear 32 to 32"]
    assert torch.equal(y.tensor, layer(x.tensor))
    assert [each.packed.columns for each in layer.method.runs] == [9, 6, 17]
    added = [
        each.packed.linear(x.tensor, each.bias, its.contiguous(), inputs=each.inputs)
        for each, its in zip(layer.method.runs, terms, strict=True)
    ]
    assert torch.equal(total.tensor, torch.cat(added, 1))


def sequential(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """The order of Llama."""
    x = ops.add(x, ops.linear(layers[0], ops.norm(x, norm())))
    return ops.add(x, ops.linear(layers[1], ops.norm(x, norm())))


def parallel(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    normed = ops.norm(x, norm())
    first = ops.linear(layers[0], normed)
    return ops.add(ops.add(x, first), ops.linear(layers[1], normed))


def parallel_branches_first(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    normed = ops.norm(x, norm())
    return ops.add(x, ops.add(ops.linear(layers[0], normed), ops.linear(layers[1], normed)))


def sandwich(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    x = ops.add(x, ops.norm(ops.linear(layers[0], ops.norm(x, norm())), norm()))
    return ops.add(x, ops.norm(ops.linear(layers[1], ops.norm(x, norm())), norm()))


def read_later(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """A later layer reads the residual."""
    y = ops.add(x, ops.linear(layers[0], ops.norm(x, norm())))
    return ops.add(ops.linear(layers[1], y), ops.norm(x, norm()))


def term_read_twice(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    term = ops.linear(layers[0], x)
    return ops.add(ops.add(x, term), ops.linear(layers[1], term))


def also_multiplied(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    x = ops.norm(x, norm())
    x = ops.add(x, ops.linear(layers[0], x))
    return ops.add(ops.linear(layers[1], x), x)


def added_to_itself(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    term = ops.linear(layers[0], x)
    return ops.linear(layers[1], ops.add(term, term))


def normed_in_between(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """The layer precedes the last norm of its residual."""
    x = ops.norm(x, norm())
    term = ops.linear(layers[0], ops.norm(x, norm()))
    other = ops.norm(x, norm())
    return ops.linear(layers[1], ops.add(ops.add(x, term), other))


def residual_made_later(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """The residual is computed after the layer's result."""
    term = ops.linear(layers[0], x)
    return ops.add(term, ops.norm(ops.linear(layers[1], ops.norm(x, norm())), norm()))


def views(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """Views of a value at its last read, and a view of a view."""
    y = ops.linear(layers[0], x)
    left, right = ops.columns(y, 0, 16), ops.columns(y, 16, 16)
    z = ops.norm(ops.columns(ops.columns(y, 4, 20), 2, 16), norm(16))
    z = ops.add(ops.add(z, right), left)
    return ops.linear(layers[2], z)


def view_of_a_term(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    term = ops.linear(layers[0], x)
    half = ops.columns(term, 16, 16)
    return ops.add(ops.add(x, term), ops.linear(layers[2], half))


def activated(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    wide = ops.activation(ops.linear(layers[0], x), Activation.GELU)
    return ops.add(x, ops.linear(layers[1], wide))


def activated_and_read(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    term = ops.linear(layers[0], x)
    return ops.linear(layers[1], ops.add(ops.activation(term, Activation.SILU), term))


def pointwise(ops: GraphBuilder, x: Value, layers: list[Linear]) -> Value:
    """Each operation overwrites its input, except values that are read later."""
    y = ops.scale(ops.linear(layers[0], x), 0.3)
    z = ops.clip(ops.multiply(y, ops.columns(ops.softcap(y, 2.0), 3, 1)), 1.5)
    z = ops.multiply(ops.activation(z, Activation.SIGMOID), z)
    return ops.linear(layers[1], ops.add(ops.multiply(z, y), ops.scale(z, 3.0)))


@pytest.mark.parametrize(
    ("model", "adds"),
    [
        (sequential, 0),
        (parallel, 0),
        (parallel_branches_first, 1),
        (sandwich, 2),
        (read_later, 0),
        (term_read_twice, 1),
        (also_multiplied, 1),  # the last sum is kept, so it reuses no memory
        (added_to_itself, 1),
        (normed_in_between, 1),
        (residual_made_later, 0),
        (views, 2),
        (view_of_a_term, 1),
        (activated, 0),
        (activated_and_read, 1),
        (pointwise, 1),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_values_equal_those_without_fusion(
    recorder: GraphBuilder, model: Callable[..., Value], adds: int, kept: bool
) -> None:
    """Compare with the same operations without memory reuse."""
    layers = [linear(32, 32, seed=2), linear(32, 32, seed=3), linear(32, 16, seed=4)]
    x = input_value()
    before = x.tensor.clone()
    out = model(recorder, x, layers)
    recorder.keep(out)
    if kept:
        recorder.keep(x)
    names = run(recorder)
    if not kept:
        assert names.count("add") == adds, names

    library = program_library()
    assert library is not None
    careful = GraphBuilder(library, DTYPE, KvMemory(full_layers(1, 1, 8, 2, 16), (), DTYPE), ROWS, 4)
    last = model(careful, Value(32, Extent.TOKENS, before.clone()), layers)
    for operation in careful._operations:
        careful.keep(operation.writes)
    assert run(careful).count("add") >= adds
    assert torch.equal(out.tensor, last.tensor)
    if kept:
        assert torch.equal(x.tensor, before)


def test_a_sum_overwrites_its_residual(recorder: GraphBuilder) -> None:
    residual = recorder.norm(input_value(), norm())
    term = recorder.linear(linear(32, 32), recorder.norm(residual, norm()))
    y = recorder.add(residual, term)
    assert run(recorder) == ["rms_norm", "rms_norm", "linear 32 to 32"]
    assert y.address == residual.address
    assert term.place is None


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_an_activation_after_a_layer_is_fused(
    recorder: GraphBuilder, kind: Activation, quantization: str
) -> None:
    """Expect the bits of the separate operation, which runs if another operation reads the layer's result."""
    x, layer = input_value(128), linear(80, 128, quantization=quantization)
    alone, seen = recorder.linear(layer, x), recorder.linear(layer, x)
    y, apart = (recorder.activation(each, kind) for each in (alone, seen))
    for value in (y, apart, seen):
        recorder.keep(value)
    assert run(recorder) == ["linear 128 to 80", "linear 128 to 80", kind]
    assert torch.equal(y.tensor, apart.tensor)
    expected = activate(seen.tensor.float(), kind)
    torch.testing.assert_close(apart.tensor.float(), expected, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
@pytest.mark.parametrize(("begin", "width"), [(3, 77), (32, 64), (1, 128)])
def test_column_slices_are_multiplied_like_separate_layers(
    recorder: GraphBuilder, quantization: str, begin: int, width: int
) -> None:
    """The other columns do not matter."""
    x, layer = input_value(160), linear(48, width, quantization=quantization)
    x.tensor[:, :begin] = torch.nan
    x.tensor[:, begin + width :] = torch.inf
    alone = Value(width, Extent.TOKENS, x.tensor[:, begin : begin + width].contiguous())
    values = [recorder.linear(layer, recorder.columns(x, begin, width)), recorder.linear(layer, alone)]
    for value in values:
        recorder.keep(value)
    run(recorder)
    assert torch.equal(values[0].tensor, values[1].tensor)
    assert values[0].tensor.isfinite().all()


def test_gates_are_not_fused_with_a_sum(recorder: GraphBuilder) -> None:
    x = input_value()
    recorder.add(x, recorder.linear(linear(64, 32, GatedActivation.SILU_AND_MUL), x))
    assert run(recorder) == ["linear 32 to 32", "add"]


def test_a_part_reads_only_kept_values(recorder: GraphBuilder) -> None:
    """A part may be rerun, so a layer of another part is not fused with its sum."""
    x = input_value()
    y = recorder.norm(x, norm())
    term = recorder.linear(linear(32, 32), y)
    recorder.mark()
    recorder.add(y, term)
    with pytest.raises(
        AssertionError, match=r"operation 2, 'add', reads a value of an earlier part that was not kept"
    ):
        recorder.finish()
    recorder.keep(y)
    recorder.keep(recorder.columns(term, 8, 8))
    recorded = recorder.finish()
    assert [span.name for span in recorded.spans] == ["rms_norm", "linear 32 to 32", "add"]
    assert recorded.parts == [recorded.spans[1].end]


def test_an_overwritten_value_is_not_read() -> None:
    x, y, z = (Value(32, Extent.TOKENS) for _ in range(3))
    x.place = torch.zeros(ROWS, 32, dtype=DTYPE)
    first = Operation("first", lambda: None, (x,), y, over=(x,))
    places = MemoryPlanner(DTYPE, dict.fromkeys(Extent, ROWS), (), Lifetimes([first]))
    places.assign(0, first)
    assert y.address == x.address
    with pytest.raises(AssertionError, match="operation 1, 'second', reads an overwritten value"):
        places.assign(1, Operation("second", lambda: None, (x,), z))


@pytest.mark.parametrize(("width", "apart"), [(2048, 2080), (1984, 2016), (64, 96), (2016, 2016), (48, 48)])
def test_rows_are_an_odd_number_of_lines_apart(recorder: GraphBuilder, width: int, apart: int) -> None:
    """Rows an even number of cache lines apart would share sets. Kept values have no gaps, although memory with gaps was free."""
    x = input_value(width)
    weight = Norm(kind=NormKind.RMS, width=width, eps=1e-6, weight=torch.ones(width, dtype=DTYPE))
    normed = recorder.norm(x, weight)
    again = recorder.norm(normed, weight)
    last = recorder.norm(again, weight)
    recorder.keep(x)
    recorder.keep(last)
    run(recorder)
    assert [value.stride for value in (normed, again, last)] == [apart, apart, width]
    expected = torch.nn.functional.rms_norm(x.tensor.float(), (width,))
    torch.testing.assert_close(last.tensor.float(), expected, rtol=2.0**-6, atol=2.0**-6)


NORMS = {
    "rms": Norm(kind=NormKind.RMS, width=32, eps=1e-5, weight=noise(32, seed=1)),
    "rms without weight": Norm(kind=NormKind.RMS, width=32, eps=1e-5),
    "Gemma's": Norm(kind=NormKind.RMS, width=32, eps=1e-5, weight=noise(32, seed=1), offset=1.0),
    "of heads": Norm(kind=NormKind.RMS, width=8, eps=1e-5, weight=noise(8, seed=1)),
    "of heads, each with its own": Norm(kind=NormKind.LAYER, width=8, eps=1e-5, weight=noise(32, seed=1)),
    "layer": Norm(kind=NormKind.LAYER, width=32, eps=1e-5, weight=noise(32, seed=1), bias=noise(32, seed=2)),
    "layer of heads": Norm(kind=NormKind.LAYER, width=8, eps=1e-5, weight=noise(8, seed=1), bias=noise(8, seed=2)),
    "layer without anything": Norm(kind=NormKind.LAYER, width=32, eps=1e-5),
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_norms(recorder: GraphBuilder, norm: Norm) -> None:
    """Against torch, on columns of a wider value."""
    x = input_value(48)
    y = recorder.norm(recorder.columns(x, 16, 32), norm)
    run(recorder)
    expected = norm(x.tensor[:, 16:])
    torch.testing.assert_close(y.tensor, expected, rtol=2.0**-6, atol=2.0**-7)


def experts(routing: Routing, width: int = 24, hidden: int = 32) -> Experts:
    """Return a layer with one stacked tensor per matrix, as in the checkpoint."""

    def stack(name: str, columns: int, depth: int, paired: bool) -> StackShape:
        shape = (routing.experts, columns, depth)
        piece = StackPiece((name,), (shape,), 0, routing.experts, 0, lambda tensors, i: tensors[0][i])
        return StackShape(
            label=name, experts=routing.experts, columns=columns, depth=depth, paired=paired, weights=[piece]
        )

    plan = WeightPlan(DTYPE, torch.device("cpu"))
    gate = Gate(activation=GatedActivation.SILU_AND_MUL)
    up, down = stack("up", 2 * width, hidden, True), stack("down", hidden, width, False)
    layer = Experts(open_quantization("none"), plan, routing, gate, up, down)
    plan.reservation = reserve(plan.stores)
    for expected in plan.expected.values():
        for packer in expected.packers:
            packer(noise(*expected.shape, seed=3) / 5)
    return layer


def test_experts_between_other_operations(recorder: GraphBuilder) -> None:
    """Routing is known only when the earlier operations have run; results equal those of separate calls."""
    layer = experts(Routing(experts=6, chosen=2, scoring=Scoring.SOFTMAX, renormalise=True))
    router, x, before = linear(6, 32), input_value(), noise(ROWS, 32, seed=1)
    y = recorder.add(x, recorder.experts(layer, x, recorder.linear(router, x)))
    recorder.keep(y)
    assert run(recorder) == ["linear 32 to 6", "2 of 6 experts", "add"]
    assert y.tensor is not None and layer.host is not None
    assert torch.equal(y.tensor, before + layer.host(before, router(before)))
