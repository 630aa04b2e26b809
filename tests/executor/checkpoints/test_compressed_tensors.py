"""Reading of compressed-tensors' formats, compared with its own package on the same tensors."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch

from quintet.executor.checkpoints.quant.decode import decode
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import StoredLayer
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.mapped import DTYPES
from quintet.executor.model_config.hf_config import HfConfig

ROWS, DEPTH = 96, 160
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    return torch.randn(ROWS, DEPTH, generator=torch.Generator().manual_seed(0))


def integers(bits: int, group: int, symmetric: bool) -> Tensors:
    grouped = weight().view(ROWS, -1, group or DEPTH)
    middle = 1 << (bits - 1)
    if symmetric:
        return {"weight": weight(), "weight_scale": grouped.abs().amax(2) / (middle - 0.5)}
    least, most = grouped.amin(2), grouped.amax(2)
    scale = (most - least) / (2 * middle - 1)
    zeros = (-(least / scale) - middle).round().clamp(-middle, middle - 1).to(torch.int8)
    return {"weight": weight(), "weight_scale": scale, "weight_zero_point": zeros}


def package(module: str) -> Any:
    """Import a module of the package; its imports cause warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"compressed_tensors.{module}")


def compare(kind: str, compressor: str, arguments: dict[str, Any], tensors: Tensors) -> None:
    quantization = package("quantization")
    module, _, name = compressor.partition(":")
    its = getattr(package(f"compressors.{module}"), name)
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    stored = its.compress(dict(tensors), scheme)
    expected = its.decompress(dict(stored), scheme)["weight"]

    assert torch.equal(decoded(kind, weights, stored), expected.float())


def decoded(kind: str, weights: Any, stored: Tensors) -> torch.Tensor:
    """Return the numbers that Quintet reads from a layer's tensors."""
    section = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump(mode="json")}},
    }
    found = recognise(HfConfig({"quantization_config": section}, "config.json"))
    assert found is not None
    contents = {f"layer.{each}": Entry(NAMES[t.dtype], tuple(t.shape), 0, 0) for each, t in stored.items()}
    ours = found.scheme(StoredLayer("layer", ROWS, DEPTH, False, contents))
    assert ours is not None
    for each in ours.stored:
        assert (
            tuple(stored[each.ending].shape) == each.shape and NAMES[stored[each.ending].dtype] in each.kinds
        )
    assert set(stored) - {each.ending for each in ours.stored} <= {"weight_shape"}
    return decode(ours, stored, DEPTH, 0, ROWS).floats()


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_integers(bits: int, group: int, symmetric: bool) -> None:
    arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None}
    arguments["strategy"] = "group" if group else "channel"
    compressor = "pack_quantized:PackedQuantizationCompressor"
    compare("pack-quantized", compressor, arguments, integers(bits, group, symmetric))


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(symmetric: bool) -> None:
    arguments = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    compressor = "naive_quantized:IntQuantizationCompressor"
    compare("int-quantized", compressor, arguments, integers(8, 0, symmetric))


def scales_of(strategy: str) -> torch.Tensor:
    if strategy == "tensor":
        return weight().abs().max().reshape(1)
    if strategy == "channel":
        return weight().abs().amax(1, keepdim=True)
    return torch.nn.functional.pad(weight(), (0, 96, 0, 32)).view(1, 128, 2, 128).abs().amax((1, 3))


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8(strategy: str) -> None:
    arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        arguments["block_structure"] = [128, 128]
    tensors = {"weight": weight(), "weight_scale": scales_of(strategy) / 448}
    compare("float-quantized", "naive_quantized:FloatQuantizationCompressor", arguments, tensors)


@pytest.mark.whole
def test_mxfp4() -> None:
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    largest = weight().view(ROWS, -1, 32).abs().amax(2)
    tensors = {"weight": weight(), "weight_scale": 2.0 ** torch.ceil(torch.log2(largest / 6))}
    compressor = "mxfp4:MXFP4PackedCompressor"
    compare("mxfp4-pack-quantized", compressor, arguments | {"scale_dtype": torch.uint8}, tensors)


@pytest.mark.whole
def test_mxfp8() -> None:
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    largest = weight().view(ROWS, -1, 32).abs().amax(2)
    tensors = {"weight": weight(), "weight_scale": 2.0 ** torch.ceil(torch.log2(largest / 448))}
    compare(
        "mxfp8-quantized",
        "mxfp8:MXFP8QuantizationCompressor",
        arguments | {"scale_dtype": torch.uint8},
        tensors,
    )


@pytest.mark.whole
def test_nvfp4() -> None:
    quantization, helpers = package("quantization"), package("compressors.nvfp4")
    arguments = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    one = (448 * 6 / weight().abs().max()).reshape(1)
    scales = (weight().view(ROWS, -1, 16).abs().amax(2) / 6 * one).to(torch.float8_e4m3fn)
    tensors = {"weight": weight(), "weight_scale": scales.float(), "weight_global_scale": one}
    stored = helpers.NVFP4PackedCompressor.compress(tensors, scheme)
    codes = helpers.unpack_fp4_from_uint8(stored["weight_packed"], ROWS, DEPTH, torch.float32)
    expected = package("quantization.lifecycle.forward").dequantize(
        x_q=codes, scale=stored["weight_scale"].float(), args=weights, global_scale=one, dtype=torch.float32
    )
    written = decoded("nvfp4-pack-quantized", weights, stored)
    # The package divides by the scale, Quintet multiplies by its reciprocal: two fp32 roundings instead of one.
    torch.testing.assert_close(written, expected, rtol=2**-22, atol=0)


@pytest.mark.whole
def test_config_groups_match_the_package() -> None:
    quantization = package("quantization")
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    section = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*down_proj", "model.1.q_proj"],
                "weights": eight,
                "format": "int-quantized",
            },
            "group_1": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
        },
        "ignore": ["lm_head", "re:.*2.*"],
    }
    names = ("q_proj", "down_proj")
    layers = torch.nn.ModuleDict({each: torch.nn.Linear(64, 64) for each in names})
    model = torch.nn.ModuleDict(
        {
            "model": torch.nn.ModuleList([copy.deepcopy(layers) for _ in range(3)]),
            "lm_head": torch.nn.Linear(64, 64),
        }
    )
    config = quantization.QuantizationConfig.model_validate(section)
    package("quantization.lifecycle.apply").apply_quantization_config(model, config)
    found = recognise(HfConfig({"quantization_config": section}, "config.json"))
    assert found is not None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            its = getattr(module, "quantization_scheme", None)
            ours = found.scheme(StoredLayer(name, 64, 64, False, None))
            assert (its and its.weights.num_bits) == (ours and ours.bits), name


@pytest.mark.whole
def test_token_scales_are_finer_than_a_static_scale() -> None:
    """A static input scale, from the largest input, rounds each token as much or more."""
    args = package("quantization").QuantizationArgs(num_bits=8, type="int", strategy="tensor", symmetric=True)
    x = (
        torch.randn(6, DEPTH, generator=torch.Generator().manual_seed(2))
        / torch.tensor([[1, 2, 3, 8, 20, 90]]).T
    )
    static = package("quantization.lifecycle.forward").fake_quantize(
        x, x.abs().max().reshape(1) / 127, torch.zeros(1), args
    )
    step = x.abs().amax(1, keepdim=True) / 127
    ours = (x / step).round() * step
    errors, its = ((each - x).norm(dim=1) for each in (ours, static))
    assert torch.equal(ours[0], static[0]) or errors[0] <= its[0] * 1.01
    assert bool((errors[1:] < its[1:]).all())
