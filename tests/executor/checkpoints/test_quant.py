"""Quantized layers against the numbers they hold, and these against the original numbers."""

from __future__ import annotations

import pytest
import torch

from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import linear
from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.quant.registry import RoundedInputs, open_quantization
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.models.layers.linear import Embedding, GatedActivation, Linear, RowRange
from quintet.wire.errors import ConfigError

requires_kernels = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

DEPTH = 200  # one full group of 128 and a partial one
QKV = (RowRange("q", 96), RowRange("k", 37), RowRange("v", 37))  # the second and third begin inside a tile
GATE_UP = (RowRange("gate", 72), RowRange("up", 72))

QUANTIZATIONS = ("none", "int8", "int4", "w8a8")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def deliver(plan: WeightPlan, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Fill the plan with random numbers, as a loader does; return them by name."""
    reserve(plan.stores)
    given = {}
    for seed, (name, expected) in enumerate(plan.expected.items()):
        given[name] = noise(*expected.shape, seed=seed).to(dtype)
        for sink in (*expected.sinks, *expected.packers):
            sink(given[name])
    return given


def layer_of(
    name: str,
    parts: tuple[RowRange, ...],
    activation: GatedActivation = GatedActivation.NONE,
    **options: bool,
) -> tuple[Linear, dict[str, torch.Tensor]]:
    plan = WeightPlan(torch.bfloat16, torch.device("cpu"))
    shape = LinearShape(parts, DEPTH, activation=activation, biased=True, **options)
    layer = Linear(open_quantization(name), plan, shape)
    return layer, deliver(plan)


@requires_kernels
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_parts_of_a_fused_tensor_equal_separate_tensors(name: str, transposed: bool, groups: int) -> None:
    """Three query heads for each KV head: ``qqqkv qqqkv`` in two groups, or all queries first."""
    heads = {"q": (48, 0), "k": (16, 48 // groups), "v": (16, 64 // groups)}
    parts = [RowRange("qkv", rows, 80, begin, groups, transposed) for rows, begin in heads.values()]
    layer, given = layer_of(name, tuple(parts))
    apart = WeightPlan(torch.bfloat16, torch.device("cpu"))
    separate = [RowRange(head, rows) for head, (rows, _) in heads.items()]
    alone = Linear(open_quantization(name), apart, LinearShape(separate, DEPTH, biased=True))
    reserve(apart.stores)
    weight, bias = given["qkv.weight"], given["qkv.bias"]
    assert weight.shape == ((DEPTH, 80) if transposed else (80, DEPTH))
    for tensor, ending in ((weight.t() if transposed else weight, "weight"), (bias, "bias")):
        pieces = tensor.reshape(groups, 80 // groups, *tensor.shape[1:])
        for head, (rows, begin) in heads.items():
            its_own = torch.cat([piece[begin : begin + rows // groups] for piece in pieces])
            expected = apart.expected[f"{head}.{ending}"]
            for sink in (*expected.sinks, *expected.packers):
                sink(its_own)
    assert layer.method.packed is not None and alone.method.packed is not None
    assert torch.equal(layer.method.packed.read(), alone.method.packed.read())
    assert torch.equal(layer(noise(3, DEPTH).bfloat16()), alone(noise(3, DEPTH).bfloat16()))


@requires_kernels
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("parts", [QKV, GATE_UP])
def test_parts_are_loaded_into_their_rows(name: str, parts: tuple[RowRange, ...]) -> None:
    activation = GatedActivation.SILU_AND_MUL if parts is GATE_UP else GatedActivation.NONE
    layer, given = layer_of(name, parts, activation)
    whole = torch.cat([given[f"{part.name}.weight"] for part in parts]).float()
    assert layer.method.packed is not None and layer.method.bias is not None
    held = layer.method.packed.read()
    # Of normal numbers, rounding in 127 steps to the largest (up to 5) loses at most 5 / 127 / sqrt(12) = 1.1 %. 16 equal
    # steps lose at least 10.7 % (Max, "Quantizing for minimum distortion", 1960). A row in the wrong place loses 141 %.
    lost = (held - whole).square().sum(1).sqrt() / whole.square().sum(1).sqrt()
    assert lost.max() <= {"none": 0.0, "int8": 0.012, "w8a8": 0.012, "int4": 0.15}[name]
    assert torch.equal(layer.method.bias, torch.cat([given[f"{part.name}.bias"] for part in parts]))


@requires_kernels
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_layer_multiplies_by_the_numbers_it_holds(name: str, rows: int) -> None:
    layer, _ = layer_of(name, QKV)
    method, x = layer.method, noise(rows, DEPTH).bfloat16()
    assert method.packed is not None
    y = layer(x)
    expected = linear(x.double(), method.packed.read().double(), method.bias.double())  # type: ignore[union-attr]
    expected = expected.bfloat16()
    # Rounding to bf16 (8 bits) of sums of about 40. With 8-bit activations also half a step of 1/127 of the largest x,
    # about 3, in each of 200 products: a standard deviation of 0.17.
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1.0 if name == "w8a8" else 0.25)


def rounded_layer(name: str, **options: bool) -> tuple[Linear, RoundedInputs]:
    plan, quantization = (
        WeightPlan(torch.bfloat16, torch.device("cpu")),
        RoundedInputs(open_quantization(name)),
    )
    layer = Linear(quantization, plan, LinearShape(QKV, DEPTH, biased=True, **options))
    deliver(plan)
    return layer, quantization


@requires_kernels
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_inputs_are_rounded_if_weights_are_integers(name: str) -> None:
    """int8 rounds them by token, like w8a8; int4 by group."""
    x = noise(3, DEPTH).bfloat16()
    x[:, :128] *= 100
    (layer, quantization), (as_it_is, _) = rounded_layer(name), layer_of(name, QKV)
    assert torch.equal(layer(x), as_it_is(x)) is (name in ("none", "w8a8"))
    assert quantization.num_layers == (name != "none")
    if name == "int8":
        assert torch.equal(layer(x), layer_of("w8a8", QKV)[0](x))


@requires_kernels
@pytest.mark.parametrize("kept", ["is_output_layer", "is_exact"])
def test_inputs_of_some_layers_are_never_rounded(kept: str) -> None:
    layer, quantization = rounded_layer("int4", **{kept: True})
    (run,) = layer.method.runs
    assert run.inputs is Inputs.SIXTEEN_BITS and quantization.num_layers == 0


@requires_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_checkpoint_of_another_dtype_is_rounded_as_torch_does(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    plan = WeightPlan(dtype, torch.device("cpu"))
    layer = Linear(open_quantization("none"), plan, LinearShape(QKV, DEPTH))
    given = deliver(plan, stored)
    assert layer.method.packed is not None
    whole = torch.cat([given[f"{part.name}.weight"] for part in QKV])
    assert torch.equal(layer.method.packed.read(), whole.float().to(dtype).float())


@requires_kernels
def test_gates_multiply_their_ups() -> None:
    layer, _ = layer_of("int8", GATE_UP, GatedActivation.SILU_AND_MUL)
    method, x = layer.method, noise(7, DEPTH).bfloat16() / 16
    assert method.packed is not None and method.bias is not None and layer.width == 72
    expected = linear(
        x.double(), method.packed.read().double(), method.bias.double(), GatedActivation.SILU_AND_MUL
    )
    # Three roundings to bf16: of the sums, of the gate, of the product.
    torch.testing.assert_close(layer(x), expected.bfloat16(), rtol=2**-6, atol=2**-6)


@requires_kernels
def test_the_output_layer_of_int4_has_8_bits() -> None:
    layer, _ = layer_of("int4", (RowRange("head", 65),), is_output_layer=True)
    assert layer.method.packed is not None
    assert layer.method.packed.format is WeightFormat.INT8


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_tied_embedding_is_never_quantized(name: str) -> None:
    if name != "none" and linear_library() is None:
        pytest.skip("the host kernels are not built")
    plan = WeightPlan(torch.bfloat16, torch.device("cpu"))
    quantization = open_quantization(name)
    shape = LinearShape((RowRange("embedding", 150),), DEPTH, is_output_layer=True)
    head = Linear(quantization, plan, shape)
    embedding = Embedding(quantization, plan, "embedding", 150, DEPTH, tied_to=head)
    table = deliver(plan)["embedding.weight"]
    ids = torch.tensor([149, 0, 77, 0, 64], dtype=torch.int32)
    assert torch.equal(embedding(ids), table[ids])
    assert (embedding.packed is None) != (embedding.table is None)


def test_without_kernels_torch_computes_or_the_error_names_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quintet.executor.checkpoints.quant.packed.linear_library", lambda: None)
    layer, given = layer_of("none", QKV)
    assert isinstance(layer.method, RowMajorLinear)
    x = noise(3, DEPTH).bfloat16()
    whole, bias = (torch.cat([given[f"{part.name}.{kind}"] for part in QKV]) for kind in ("weight", "bias"))
    assert torch.equal(layer(x), torch.nn.functional.linear(x, whole, bias))
    with pytest.raises(ConfigError, match=r"--quantization int4 needs .*compiler"):
        open_quantization("int4")


def test_an_unknown_quantization_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="none, int8, int4, w8a8"):
        open_quantization("int3")
