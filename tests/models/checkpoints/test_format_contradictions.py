"""Layers of quantized checkpoints that the configuration names in unusual ways, or that contradict it."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import Scheme, StoredLayer
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

ROWS, DEPTH = 64, 128
Shapes = dict[str, tuple[str, tuple[int, ...]]]
PACKED: dict[int, Shapes] = {
    bits: {
        "qweight": ("I32", (DEPTH * bits // 32, ROWS)),
        "qzeros": ("I32", (1, ROWS * bits // 32)),
        "scales": ("F16", (1, ROWS)),
    }
    for bits in (4, 8)
}
NVFP4: Shapes = {
    "weight": ("U8", (ROWS, DEPTH // 2)),
    "weight_scale": ("F8_E4M3", (ROWS, DEPTH // 16)),
    "weight_scale_2": ("F32", ()),
    "input_scale": ("F32", ()),
}
FLOATS: Shapes = {"weight": ("BF16", (ROWS, DEPTH))}


def scheme_of(section: dict[str, Any], name: str, shapes: Shapes) -> Scheme | None:
    """Return the scheme of a layer with these tensors."""
    found = recognise(HfConfig({"quantization_config": section}, "config.json"))
    assert found is not None
    contents = {f"{name}.{ending}": Entry(kind, shape, 0, 0) for ending, (kind, shape) in shapes.items()}
    return found.scheme(StoredLayer(name, ROWS, DEPTH, name == "lm_head", contents, "model."))


@pytest.mark.parametrize(
    ("overrides", "bits"),
    [
        ({".*mlp.down_proj": {"bits": 8}}, 8),
        ({"mlp.down_proj$": {"bits": 8}}, 8),
        ({"down_proj": {"bits": 8}}, 8),
        ({"model.layers.0.mlp.down_proj": {"bits": 8}}, 8),
        ({".*down_proj": {"bits": 4}, "layers.0.mlp.down_proj": {"bits": 8}}, 8),
        ({"proj": {"bits": 8}, "layers.0.mlp": {"bits": 8}}, 4),
    ],
    ids=str,
)
def test_autoround_overrides_layers_by_name_end_of_name_or_expression(
    overrides: dict[str, Any], bits: int
) -> None:
    section = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": overrides}
    scheme = scheme_of(section, "model.layers.0.mlp.down_proj", PACKED[bits])
    assert scheme is not None and scheme.bits == bits


def test_expression_of_autoround_leaves_layers_out() -> None:
    section = {"quant_method": "auto-round", "bits": 4, "extra_config": {".*attn.*": {"bits": 16}}}
    assert scheme_of(section, "model.layers.0.self_attn.q_proj", FLOATS) is None


def test_invalid_expression_of_autoround_is_rejected() -> None:
    section = {"quant_method": "auto-round", "bits": 4, "extra_config": {"*attn": {"bits": 16}, "(": {}}}
    with pytest.raises(ConfigError, match=r"extra_config has the pattern .*must be a regular expression"):
        scheme_of(section, "model.layers.0.self_attn.q_proj", FLOATS)


@pytest.mark.parametrize(
    ("section", "shapes"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]}, NVFP4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False}, PACKED[4]),
        ({"quant_method": "gptq", "bits": 8, "dynamic": {"-:lm_head": {}}}, PACKED[8]),
    ],
    ids=str,
)
def test_quantized_layer_is_read_though_the_configuration_leaves_it_out(
    section: dict[str, Any], shapes: Shapes
) -> None:
    scheme = scheme_of(section, "lm_head", shapes)
    assert scheme is not None and scheme.stored[0].shape == shapes[scheme.stored[0].ending][1]


@pytest.mark.parametrize("more", [{}, {"weight_scale": ("F32", ())}], ids=str)
def test_layer_that_is_left_out_keeps_its_floats(more: Shapes) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert scheme_of(section, "lm_head", FLOATS | more) is None


def test_layout_of_awq_under_the_newer_key() -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 128, "checkpoint_format": "gemv"}
    shapes: Shapes = {"qweight": ("I32", (ROWS, DEPTH // 8))}
    scheme = scheme_of(section, "model.layers.0.mlp.up_proj", shapes)
    assert scheme is not None and scheme.stored[0].shape == (ROWS, DEPTH // 8)
    with pytest.raises(ConfigError, match=r"unsupported AWQ checkpoint_format 'gemv_fast'.*'gemm' or 'gemv'"):
        scheme_of(section | {"checkpoint_format": "gemv_fast"}, "model.layers.0.mlp.up_proj", shapes)
