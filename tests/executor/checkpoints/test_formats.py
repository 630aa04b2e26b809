"""Layers of quantized checkpoints against the dequantized numbers of their tensors: exact where kernels can hold them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from bench.quantization import layers
from bench.quantization import more_layers as tools
from bench.quantization.layers import Array, Tensors, Written

from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat, linear_library
from quintet.executor.checkpoints.quant import source
from quintet.executor.checkpoints.quant.coded import kept_of
from quintet.executor.checkpoints.quant.fill import packed_format_of
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import StoredLayer
from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.quant.packed import Unquantized
from quintet.executor.checkpoints.quant.packed_formats import PackedFormat
from quintet.executor.checkpoints.quant.stored import StoredQuantization
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.mapped import DTYPES
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.models.layers.linear import GatedActivation, Linear, RowRange
from quintet.wire.errors import ConfigError

requires_kernels = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

DEPTH = 160  # a group of 128 and a partial one; also of 64; five of 32
CPU = torch.device("cpu")
NAMES = {dtype: name for name, dtype in DTYPES.items()}

GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BY_ROW = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}

KEPT: dict[str, tuple[Written, WeightFormat, int]] = {
    "gptq, 2 bits": (layers.gptq(2, 32, symmetric=True), WeightFormat.INT4, 32),
    "gptq, 2 bits, zeros": (layers.gptq(2, 32, symmetric=False), WeightFormat.INT4_ZEROS, 32),
    "gptq, 3 bits": (layers.gptq(3, 64, symmetric=True), WeightFormat.INT4, 64),
    "gptq, 3 bits, zeros": (layers.gptq(3, 32, symmetric=False), WeightFormat.INT4_ZEROS, 32),
    "gptq, 4 bits": (layers.gptq(4, 128, symmetric=True), WeightFormat.INT4, 128),
    "gptq, 4 bits, one group": (layers.gptq(4, 0, symmetric=False), WeightFormat.INT4_ZEROS, 128),
    "gptq, 4 bits, groups of 96": (layers.gptq(4, 96, symmetric=True), WeightFormat.INT4, 32),
    "gptq, second version": (layers.gptq(4, 32, symmetric=False, version=2), WeightFormat.INT4_ZEROS, 32),
    "gptq, ordered": (
        layers.gptq(4, 32, symmetric=False, by_activations=True),
        WeightFormat.INT4_ZEROS,
        32,
    ),
    "gptq, groups of 16": (layers.gptq(4, 16, symmetric=True), WeightFormat.INT4, 16),
    "gptq, 8 bits": (layers.gptq(8, 0, symmetric=True), WeightFormat.INT8, 0),
    "gptq, 8 bits, zeros": (layers.gptq(8, 32, symmetric=False), WeightFormat.INT8_ZEROS, 32),
    "compressed-tensors": (layers.compressed(GROUPS, "pack-quantized"), WeightFormat.INT4, 32),
    "compressed-tensors, zeros": (
        layers.compressed(GROUPS | {"symmetric": False}, "pack-quantized"),
        WeightFormat.INT4_ZEROS,
        32,
    ),
    "compressed-tensors, ordered": (
        layers.compressed(GROUPS | {"symmetric": False, "actorder": "group"}, "pack-quantized"),
        WeightFormat.INT4_ZEROS,
        32,
    ),
    "compressed-tensors, 3 bits": (
        layers.compressed(GROUPS | {"num_bits": 3}, "pack-quantized"),
        WeightFormat.INT4,
        32,
    ),
    "compressed-tensors, 6 bits": (
        layers.compressed(GROUPS | {"num_bits": 6}, "pack-quantized"),
        WeightFormat.INT8,
        32,
    ),
    "compressed-tensors, bytes": (layers.compressed(BY_ROW, "int-quantized"), WeightFormat.INT8, 0),
    "compressed-tensors, bytes, zeros": (
        layers.compressed(BY_ROW | {"symmetric": False}, "int-quantized"),
        WeightFormat.INT8_ZEROS,
        128,
    ),
    "compressed-tensors, mxfp4": (
        layers.compressed(
            FLOATS | {"num_bits": 4, "strategy": "group", "group_size": 32},
            "mxfp4-pack-quantized",
            tensors=layers.four_bit_floats(32),
        ),
        WeightFormat.MXFP4,
        0,
    ),
    "compressed-tensors, nvfp4": (
        layers.compressed(
            FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            "nvfp4-pack-quantized",
            tensors=layers.four_bit_floats(16, global_scale="weight_global_scale"),
        ),
        WeightFormat.NVFP4,
        0,
    ),
    "compressed-tensors, mxfp8": (
        layers.compressed(
            FLOATS | {"num_bits": 8, "strategy": "group", "group_size": 32},
            "mxfp8-quantized",
            tensors=layers.eight_bit_floats_of_powers,
        ),
        WeightFormat.FP8,
        32,
    ),
    "modelopt, nvfp4": (
        Written(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
            layers.four_bit_floats(16, "weight", "weight_scale_2", divides=False),
        ),
        WeightFormat.NVFP4,
        0,
    ),
    "quark, int8": (tools.quark_integers("int8"), WeightFormat.INT8, 0),
    "quark, int8, zeros": (
        tools.quark_integers("int8", symmetric=False),
        WeightFormat.INT8_ZEROS,
        128,
    ),
    "quark, int4": (tools.quark_integers("int4", 32), WeightFormat.INT4, 32),
    "quark, uint4": (
        tools.quark_integers("uint4", 32, symmetric=False),
        WeightFormat.INT4_ZEROS,
        32,
    ),
    "bitnet": (tools.bitnet(), WeightFormat.INT4, 128),
    "bitnet, multiplied": (tools.bitnet(divides=False), WeightFormat.INT4, 128),
    "auto-round": (tools.autoround("auto_round", 4, 32), WeightFormat.INT4_ZEROS, 32),
    "auto-round, as GPTQ": (
        tools.autoround("auto_round:auto_gptq", 8, 32),
        WeightFormat.INT8_ZEROS,
        32,
    ),
    "auto-round, as GPTQModel": (
        tools.autoround("auto_round:gptqmodel", 2, 32, symmetric=True),
        WeightFormat.INT4,
        32,
    ),
    "auto-round, mxfp4": (
        tools.autoround_floats("mx_fp", 4, layers.four_bit_floats(32)),
        WeightFormat.MXFP4,
        0,
    ),
    "auto-round, nvfp4": (
        tools.autoround_floats("nv_fp", 4, layers.four_bit_floats(16, global_scale="weight_global_scale")),
        WeightFormat.NVFP4,
        0,
    ),
    "modelopt, int8": (tools.modelopt_integers("W8A16"), WeightFormat.INT8, 0),
    "modelopt, fp8 of rows": (
        Written(
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            layers.eight_bit_floats("weight_scale", (1, 0)),
        ),
        WeightFormat.FP8,
        128,
    ),
    "modelopt, mxfp4": (
        Written(
            {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"},
            layers.four_bit_floats(32, "weight"),
        ),
        WeightFormat.MXFP4,
        0,
    ),
    "fp8": (layers.fp8(block=True), WeightFormat.FP8, 128),
    "fp8, one scale": (layers.fp8(block=False), WeightFormat.FP8, 128),
    "fp8, of fbgemm": (layers.fp8(block=False, method="fbgemm_fp8"), WeightFormat.FP8, 128),
    "bitsandbytes, int8": (layers.bitsandbytes("int8"), WeightFormat.INT8, 0),
    "awq": (layers.awq(32), WeightFormat.INT4_ZEROS, 32),
    "awq, gemv": (layers.awq(32, "gemv"), WeightFormat.INT4_ZEROS, 32),
    "torchao": (tools.torchao("Int8WeightOnlyConfig"), WeightFormat.INT8, 0),
    "torchao, fp8": (tools.torchao("Float8WeightOnlyConfig"), WeightFormat.FP8, 128),
    "torchao, groups": (tools.torchao("Int8WeightOnlyConfig", 32), WeightFormat.INT8_SINGLE, 32),
    "torchao, groups, zeros": (
        tools.torchao("IntxWeightOnlyConfig", 32, symmetric=False),
        WeightFormat.INT8_SINGLE_ZEROS,
        32,
    ),
    "modelopt, int4": (tools.modelopt_integers("W4A16_AWQ", 32), WeightFormat.INT4_SINGLE, 32),
    "hqq": (tools.hqq(4, 32), WeightFormat.INT4_SINGLE_ZEROS, 32),
    "hqq, 1 bit": (tools.hqq(1, 32), WeightFormat.INT4_SINGLE_ZEROS, 32),
    "hqq, 3 bits": (tools.hqq(3, 16), WeightFormat.INT4_SINGLE_ZEROS, 16),
    "hqq, 2 bits, as floats": (tools.hqq(2, 32, as_floats=True), WeightFormat.INT4_SINGLE_ZEROS, 32),
    "hqq, 8 bits, one group": (tools.hqq(8, 0), WeightFormat.INT8_SINGLE_ZEROS, 128),
    "squeezellm": (tools.squeezellm(4), WeightFormat.TABLES, 0),
    "squeezellm, 3 bits": (tools.squeezellm(3), WeightFormat.TABLES, 0),
    "squeezellm, 3 bits, tables alone": (tools.squeezellm(3, outliers=False), WeightFormat.TABLES, 0),
}
"""Quantization methods, with format and group of the host's weights."""

ROUNDED = {
    "modelopt, factors of inputs": tools.modelopt_integers("W4A16_AWQ", 32, factors=True),
    "modelopt, smoothed": tools.modelopt_integers("W8A8_SQ_PER_CHANNEL", factors=True),
    "hqq, along axis 0": tools.hqq(4, 64, axis=0),
    "hqq, groups across rows": tools.hqq(4, 64),
    "gptq, groups of 20": layers.gptq(4, 20, symmetric=True),
    "fp8 of another kind": Written(
        {"quant_method": "fp8"}, layers.eight_bit_floats("weight_scale", (1, 0), torch.float8_e5m2)
    ),
}
"""Formats without a kernel: rounded to the model's dtype."""


def noise(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, DEPTH)).astype(np.float32)


def loaded(
    written: Written,
    parts: list[RowRange],
    activation: GatedActivation = GatedActivation.NONE,
    plain: dict[str, torch.Tensor] | None = None,
    where: torch.device | None = None,
) -> tuple[Linear, dict[str, torch.Tensor]]:
    """Return a layer with its weights, and the dequantized numbers of each tensor of its parts.

    where: device that multiplies; None: the host.
    """
    numbers, tensors = {}, dict(plain or {})
    for seed, part in enumerate({part.name: part for part in parts}.values()):
        if f"{part.name}.weight" not in tensors:
            its, values = written.tensors(part.name, noise(part.height, seed))
            tensors |= {f"{part.name}.{ending}": tensor for ending, tensor in its.items()}
            numbers[part.name] = torch.from_numpy(np.ascontiguousarray(values))
    contents = {
        name: Entry(NAMES[tensor.dtype], tuple(tensor.shape), 0, 0) for name, tensor in tensors.items()
    }
    found = recognise(HfConfig({"quantization_config": dict(written.section)}, "config.json"))
    assert found is not None
    plan = WeightPlan(torch.bfloat16, where or CPU)
    quantization = StoredQuantization(found, Unquantized(), contents, on_device=where is not None)
    layer = Linear(quantization, plan, LinearShape(parts, DEPTH, activation=activation))
    reserve(plan.stores)
    for name, expected in plan.expected.items():
        assert tuple(tensors[name].shape) == expected.shape, name
        for sink in (*expected.sinks, *expected.packers):
            sink(tensors[name])
    return layer, numbers


@requires_kernels
@pytest.mark.parametrize("name", KEPT)
def test_packed_weights_equal_the_checkpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_CODES", 1)  # one row at a time
    written, weight_format, group = KEPT[name]
    layer, numbers = loaded(written, [RowRange("q", 288), RowRange("k", 32), RowRange("v", 32)])
    packed = layer.method.packed
    assert packed is not None and (packed.format, packed.group) == (weight_format, group)
    order, whole = layer.method.runs[0].order, torch.cat([numbers[each] for each in "qkv"])
    assert (order is not None) == name.endswith("ordered")
    assert torch.equal(packed.read(), whole if order is None else whole[:, order])
    assert not layer.method.is_quantized
    x = torch.from_numpy(noise(3, seed=4)).bfloat16()
    # Activations of 16 bits, and a rounding of sums of about 10 to bf16.
    torch.testing.assert_close(layer(x).float(), x.float() @ whole.t(), rtol=2**-7, atol=2**-5)


@requires_kernels
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int4WeightOnlyConfig"])
def test_input_factors_are_folded_into_the_weights(name: str) -> None:
    plain = tools.torchao(name, 32)
    factors = torch.rand(DEPTH, generator=torch.Generator().manual_seed(3)) + 0.5

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        its, numbers = plain.tensors(name, weight)
        return its | {"_weight_act_pre_scale": factors}, numbers * factors.numpy()

    layer, numbers = loaded(Written(plain.section, tensors), [RowRange("q", 96)])
    packed = layer.method.packed
    assert packed is not None and packed.format is WeightFormat.BF16
    torch.testing.assert_close(packed.read(), numbers["q"].bfloat16().float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize(("kind", "kept"), [("nf4", WeightFormat.NF4), ("fp4", WeightFormat.FP4)])
def test_lookup_tables_are_kept(kind: str, kept: WeightFormat) -> None:
    found = recognise(HfConfig({"quantization_config": layers.bitsandbytes(kind).section}, "config.json"))
    assert found is not None
    scheme = found.scheme(StoredLayer("q", 96, 128, False, None))
    assert packed_format_of([scheme, scheme], torch.bfloat16) == PackedFormat(kept, 64)


@requires_kernels
def test_zero_points_are_computed_from_added_terms() -> None:
    """torchao's 4 bits are ``code * scale + added``; if added / scale is no integer, its fp32 rounding is the error."""
    layer, numbers = loaded(tools.torchao("Int4WeightOnlyConfig", 32, symmetric=False), [RowRange("q", 96)])
    packed = layer.method.packed
    assert packed is not None and (packed.format, packed.group) == (WeightFormat.INT4_SINGLE_ZEROS, 32)
    largest = numbers["q"].abs().max()
    assert float((packed.read() - numbers["q"]).abs().max() / largest) < 2**-22


@requires_kernels
def test_fused_layers_must_have_the_same_input_order() -> None:
    def turned(name: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, numbers = written.tensors(name, weight)
        if name == "k":
            tensors["g_idx"] = tensors["g_idx"].flip(0)
        return tensors, numbers

    written = KEPT["gptq, ordered"][0]
    with pytest.raises(ConfigError, match="layer 'k': its order of inputs differs"):
        loaded(Written(written.section, turned), [RowRange("q", 96), RowRange("k", 32)])


@requires_kernels
@pytest.mark.parametrize("name", KEPT)
def test_inputs_are_rounded_if_integers_are_multiplied(name: str) -> None:
    """By token if the checkpoint requires it or the weight has no groups."""
    layer, _ = loaded(KEPT[name][0], [RowRange("q", 96)])
    (run,) = layer.method.runs
    says_so = run.inputs is Inputs.EIGHT_BITS
    assert run.round_inputs() is KEPT[name][1].is_integer
    rounded = Inputs.EIGHT_BITS if says_so else Inputs.EIGHT_BITS_IN_GROUPS
    assert run.inputs is (rounded if KEPT[name][1].is_integer else Inputs.SIXTEEN_BITS)


@requires_kernels
@pytest.mark.parametrize("name", ROUNDED)
def test_formats_without_kernel_are_rounded_once(name: str) -> None:
    layer, numbers = loaded(ROUNDED[name], [RowRange("q", 96), RowRange("k", 32)])
    packed = layer.method.packed
    assert packed is not None and packed.format is WeightFormat.BF16
    assert torch.equal(packed.read(), torch.cat([numbers["q"], numbers["k"]]).bfloat16().float())


@requires_kernels
@pytest.mark.parametrize(
    "written",
    [
        *(tools.hqq(bits, 32) for bits in (1, 2, 3, 4, 8)),
        tools.hqq(4, 64, axis=0),
        tools.torchao("Int4WeightOnlyConfig", 32, symmetric=False),
        tools.torchao("Int8WeightOnlyConfig"),
        tools.torchao("IntxWeightOnlyConfig", 32, symmetric=False),
        tools.torchao("Float8WeightOnlyConfig"),
        tools.squeezellm(4),
        tools.squeezellm(3, outliers=False),
    ],
    ids=lambda each: each.section["quant_method"],
)
def test_estimated_weight_bytes_equal_the_loaded_bytes(written: Written) -> None:
    layer, _ = loaded(written, [RowRange("q", 960)])
    its, _ = written.tensors("q", noise(960))
    contents = {
        f"q.{ending}": Entry(NAMES[each.dtype], tuple(each.shape), 0, each.numel() * each.element_size())
        for ending, each in its.items()
    }
    found = recognise(HfConfig({"quantization_config": dict(written.section)}, "config.json"))
    assert found is not None
    packed = sum(run.num_bytes for run in layer.method.runs)
    # Except zero points that are not kept, and full groups of 128 for a row's single group: 256 inputs instead of 160.
    assert 0.95 * packed < found.memory_bytes(contents, 2) < 1.1 * packed


def test_experts_with_outliers_are_estimated_by_their_rounded_format() -> None:
    written = tools.squeezellm(4)
    weight = noise(960)
    its, _ = written.tensors("q", weight)
    found = recognise(HfConfig({"quantization_config": dict(written.section)}, "config.json"))
    assert found is not None
    for stem, at_least, at_most in (("q", 0.5, 1.5), ("mlp.experts.3.q", 2.0, 2.5)):
        contents = {
            f"{stem}.{ending}": Entry(
                NAMES[each.dtype], tuple(each.shape), 0, each.numel() * each.element_size()
            )
            for ending, each in its.items()
        }
        assert at_least <= found.memory_bytes(contents, 2) / weight.size < at_most


@requires_kernels
@pytest.mark.parametrize("name", ["compressed-tensors", "torchao", "modelopt", "quark"])
def test_activations_of_8_bits_follow_the_checkpoint(name: str) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    written = {
        "compressed-tensors": layers.compressed(BY_ROW, "int-quantized", inputs),
        "torchao": tools.torchao("Int8DynamicActivationInt8WeightConfig"),
        "modelopt": tools.modelopt_integers("W8A8_SQ_PER_CHANNEL"),
        "quark": tools.quark_integers("int8", activations=True),
    }[name]
    layer, numbers = loaded(written, [RowRange("q", 96), RowRange("k", 32)])
    packed = layer.method.packed
    assert packed is not None and layer.method.runs[0].inputs is Inputs.EIGHT_BITS
    x = torch.from_numpy(noise(5, seed=9)).bfloat16()
    step = x.float().abs().amax(1, keepdim=True) / 127
    rounded = (x.float() / step).round() * step
    whole = torch.cat([numbers["q"], numbers["k"]])
    # Sums of integers are exact; bf16 rounds the result to 8 bits.
    torch.testing.assert_close(layer(x).float(), rounded @ whole.t(), rtol=2**-7, atol=1e-2)


def _with_zeros(written: Written, *path: str) -> Written:
    """Return the checkpoint with activation zero points; ``path`` leads to the field that enables them."""
    section = copy.deepcopy(dict(written.section))
    inner: Any = section
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = {"_type": "MappingType", "_data": "ASYMMETRIC"} if path[0] == "quant_type" else False
    return Written(section, written.tensors)


@requires_kernels
@pytest.mark.parametrize("name", ["compressed-tensors", "torchao", "quark"])
def test_activations_with_zero_points_keep_16_bits(name: str) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
    written = {
        "compressed-tensors": layers.compressed(BY_ROW, "int-quantized", inputs),
        "torchao": _with_zeros(
            tools.torchao("Int8DynamicActivationInt8WeightConfig"),
            *("quant_type", "default", "_data", "act_mapping_type"),
        ),
        "quark": _with_zeros(
            tools.quark_integers("int8", activations=True),
            *("global_quant_config", "input_tensors", "symmetric"),
        ),
    }[name]
    layer, numbers = loaded(written, [RowRange("q", 96), RowRange("k", 32)])
    assert layer.method.runs[0].inputs is Inputs.SIXTEEN_BITS
    assert layer.method.packed is not None and layer.method.packed.format is WeightFormat.INT8
    assert torch.equal(layer.method.packed.read(), torch.cat([numbers["q"], numbers["k"]]))


@requires_kernels
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["gptq, 4 bits", "awq"])
def test_parts_of_a_fused_tensor_are_its_rows(name: str, groups: int) -> None:
    heads = {"q": (192, 0), "k": (64, 192 // groups), "v": (64, 256 // groups)}
    parts = [RowRange("qkv", rows, 320, begin, groups) for rows, begin in heads.values()]
    layer, numbers = loaded(KEPT[name][0], parts)
    pieces = numbers["qkv"].reshape(groups, -1, DEPTH)
    expected = [
        pieces[:, begin : begin + rows // groups].reshape(rows, DEPTH) for rows, begin in heads.values()
    ]
    assert layer.method.packed is not None
    assert torch.equal(layer.method.packed.read(), torch.cat(expected))


@requires_kernels
def test_gates_and_ups_have_separate_scales() -> None:
    layer, numbers = loaded(
        KEPT["awq"][0], [RowRange("gate", 64), RowRange("up", 64)], GatedActivation.SILU_AND_MUL
    )
    assert layer.method.packed is not None
    assert torch.equal(layer.method.packed.read(), torch.cat([numbers["gate"], numbers["up"]]))


@requires_kernels
@pytest.mark.parametrize(
    ("other", "weight_format", "group"),
    [
        ({"bits": 8}, WeightFormat.INT8, 32),
        ({"bits": 8, "sym": False}, WeightFormat.INT8_ZEROS, 32),
        ({"sym": False}, WeightFormat.INT4_ZEROS, 32),
        ({"group_size": 64}, WeightFormat.INT4, 32),
        ({"group_size": -1}, WeightFormat.INT4, 32),
    ],
)
def test_parts_of_different_formats_use_the_wider_one(
    other: dict[str, int | bool], weight_format: WeightFormat, group: int
) -> None:
    layer, values = loaded(with_another_k(other), [RowRange("q", 96), RowRange("k", 32)])
    packed, whole = layer.method.packed, torch.cat([values["q"], values["k"]])
    assert packed is not None and (packed.format, packed.group) == (weight_format, group)
    assert torch.equal(packed.read(), whole)


def with_another_k(other: dict[str, int | bool]) -> Written:
    """Return 4 bits in groups of 32, except for the layer ``k``."""
    plain = layers.gptq(4, 32, symmetric=True)
    numbers = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False} | other
    its = layers.gptq(
        int(numbers["bits"]),
        max(0, int(numbers["group_size"])),
        symmetric=bool(numbers["sym"]),
        by_activations=bool(numbers["desc_act"]),
    )

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        return (its if name == "k" else plain).tensors(name, weight)

    return Written({**plain.section, "dynamic": {"k": other}}, tensors)


@requires_kernels
def test_a_part_with_reordered_inputs_is_a_separate_weight() -> None:
    layer, numbers = loaded(
        with_another_k({"desc_act": True}), [RowRange("q", 96), RowRange("k", 32), RowRange("v", 32)]
    )
    q, k, v = layer.method.runs
    assert q.order is None is v.order and k.order is not None
    x = torch.from_numpy(noise(3, seed=4)).bfloat16()
    whole = torch.cat([numbers[each] for each in "qkv"])
    torch.testing.assert_close(layer(x).float(), x.float() @ whole.t(), rtol=2**-7, atol=2**-5)


@requires_kernels
def test_an_unquantized_part_is_a_separate_weight() -> None:
    left_out = {"k.weight": torch.from_numpy(noise(32)).bfloat16()}
    layer, numbers = loaded(KEPT["gptq, 4 bits"][0], [RowRange("q", 96), RowRange("k", 32)], plain=left_out)
    q, k = (run.packed for run in layer.method.runs)
    assert (q.format, k.format) == (WeightFormat.INT4, WeightFormat.BF16)
    assert torch.equal(q.read(), numbers["q"]) and torch.equal(k.read(), left_out["k.weight"].float())


@requires_kernels
def test_a_gate_and_its_up_share_one_weight() -> None:
    left_out = {"up.weight": torch.from_numpy(noise(64)).bfloat16()}
    gate_up = [RowRange("gate", 64), RowRange("up", 64)]
    layer, numbers = loaded(KEPT["gptq, 4 bits"][0], gate_up, GatedActivation.SILU_AND_MUL, left_out)
    assert layer.method.packed is not None
    whole = torch.cat([numbers["gate"].bfloat16(), left_out["up.weight"]])
    assert torch.equal(layer.method.packed.read(), whole.float())


def test_without_kernels_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.executor.checkpoints.quant.packed.linear_library", lambda: None)
    layer, numbers = loaded(KEPT["gptq, 4 bits"][0], [RowRange("q", 96), RowRange("k", 32)])
    whole = torch.cat([numbers["q"], numbers["k"]]).bfloat16()
    assert layer.method.table is not None and torch.equal(layer.method.table, whole)


@pytest.mark.parametrize(
    ("written", "is_kept"),
    [
        (tools.hqq(4, 32), True),
        (tools.hqq(4, 64, axis=0), False),
        (tools.squeezellm(4, outliers=False), False),
        (tools.torchao("Int8WeightOnlyConfig", 32), True),
        (tools.bitnet(), True),
        (tools.quark_integers("int4", 32), True),
    ],
)
def test_a_device_keeps_codes_of_contiguous_groups(written: Written, is_kept: bool) -> None:
    found = recognise(HfConfig({"quantization_config": dict(written.section)}, "config.json"))
    assert found is not None
    kept = kept_of(found.scheme(StoredLayer("q", 96, 128, False, None)), 128, torch.bfloat16)
    assert (kept is not None) == is_kept
    assert kept is None or not kept.has_zeros
