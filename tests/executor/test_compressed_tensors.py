"""What we read of compressed-tensors' formats, against what its own package makes of the same tensors."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from quintet.executor.cards.card import ModelCard
from quintet.executor.quant.decode import decode
from quintet.executor.quant.formats.registry import recognise
from quintet.executor.quant.formats.scheme import StoredLayer
from quintet.executor.weights.header import Entry
from quintet.executor.weights.mapped import DTYPES

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


def compare(kind: str, compressor: str, arguments: dict[str, Any], tensors: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports'
        quantization = importlib.import_module("compressed_tensors.quantization")
        module, _, name = compressor.partition(":")
        its = getattr(importlib.import_module(f"compressed_tensors.compressors.{module}"), name)
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    stored = its.compress(dict(tensors), scheme)
    expected = its.decompress(dict(stored), scheme)["weight"]

    section = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump(mode="json")}},
    }
    found = recognise(ModelCard({"quantization_config": section}, "config.json"))
    assert found is not None
    contents = {f"layer.{each}": Entry(NAMES[t.dtype], tuple(t.shape), 0, 0) for each, t in stored.items()}
    ours = found.scheme(StoredLayer("layer", ROWS, DEPTH, False, contents))
    assert ours is not None
    for each in ours.stored:
        assert (
            tuple(stored[each.ending].shape) == each.shape and NAMES[stored[each.ending].dtype] in each.kinds
        )
    assert set(stored) - {each.ending for each in ours.stored} <= {"weight_shape"}
    assert torch.equal(decode(ours, stored, DEPTH, 0, ROWS).floats(), expected.float())


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integers_in_words(bits: int, group: int, symmetric: bool) -> None:
    arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None}
    arguments["strategy"] = "group" if group else "channel"
    compressor = "pack_quantized:PackedQuantizationCompressor"
    compare("pack-quantized", compressor, arguments, integers(bits, group, symmetric))


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_in_bytes(symmetric: bool) -> None:
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
def test_floats_in_bytes(strategy: str) -> None:
    arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        arguments["block_structure"] = [128, 128]
    tensors = {"weight": weight(), "weight_scale": scales_of(strategy) / 448}
    compare("float-quantized", "naive_quantized:FloatQuantizationCompressor", arguments, tensors)


@pytest.mark.whole
def test_floats_of_4_bits_with_exponents() -> None:
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    largest = weight().view(ROWS, -1, 32).abs().amax(2)
    tensors = {"weight": weight(), "weight_scale": 2.0 ** torch.ceil(torch.log2(largest / 6))}
    compressor = "mxfp4:MXFP4PackedCompressor"
    compare("mxfp4-pack-quantized", compressor, arguments | {"scale_dtype": torch.uint8}, tensors)
