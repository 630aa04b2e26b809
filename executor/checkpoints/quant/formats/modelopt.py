"""ModelOpt (NVIDIA): 8-bit and 4-bit floats and integers, as its export for Hugging Face writes them.

FP8, FP8_PER_CHANNEL_PER_TOKEN      weight fp8 [rows, depth]          weight_scale: one number; one for each row
MXFP8                               weight fp8 [rows, depth]          weight_scale uint8 [rows, depth / 32], exponents
NVFP4, also W4A16_ and W4A8_…_FP8   weight uint8 [rows, depth / 2]    weight_scale fp8 [rows, depth / 16], times weight_scale_2
W4A8_MXFP4_FP8                      weight uint8 [rows, depth / 2]    weight_scale uint8 [rows, depth / 32], exponents
W8A16, W8A8_SQ_PER_CHANNEL          weight int8 [rows, depth]         weight_scale [rows]
W4A16_AWQ                           weight uint8 [rows / 2, depth]    weight_scale [rows, groups]; two rows in a byte, signed

AWQ and SmoothQuant (Xiao et al., 2022): pre_quant_scale [depth] multiplies the inputs, unless it was folded into the
previous layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    MOST_GROUP,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    in_words,
    with_input_factors,
)
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp4_scheme, fp8_scheme, int8_scheme
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

MIXED = "MIXED_PRECISION"
NVFP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8")
ALGORITHMS = {
    "FP8": "8-bit floats, a scale for each tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "8-bit floats, a scale for each row",
    "MXFP8": "8-bit floats, groups of {group}",
    **dict.fromkeys((*NVFP4, "W4A8_MXFP4_FP8"), "4-bit floats, groups of {group}"),
    "W8A16": "8-bit integers, a scale for each row",
    "W8A8_SQ_PER_CHANNEL": "8-bit integers, a scale for each row, 8-bit activations",
    "W4A16_AWQ": "4-bit integers, groups of {group}",
}
"""Supported algorithms and their descriptions."""
GROUPS = dict.fromkeys(NVFP4, 16) | {"MXFP8": 32, "W4A8_MXFP4_FP8": 32}
"""Fixed group sizes."""
MARK = "weight_scale"
IGNORED = ("*.input_scale", "*.k_scale", "*.v_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")


@dataclass(frozen=True, slots=True)
class ModelOptConfig:
    """Configuration of a layer's weights."""

    algorithm: str
    group: int

    @property
    def words(self) -> str:
        return ALGORITHMS[self.algorithm].format(group=self.group)


def _scheme(
    usual: ModelOptConfig | None,
    by_name: Mapping[str, ModelOptConfig],
    left_out: tuple[str, ...],
    layer: StoredLayer,
) -> Scheme | None:
    """left_out: name patterns; ``*`` matches anything."""
    numbers = next((by_name[name] for name in layer.names if name in by_name), usual)
    is_left_out = any(fnmatchcase(name, each) for name in layer.names for each in left_out)
    if numbers is None or layer.is_plain(MARK, is_left_out=is_left_out):
        return None
    return with_input_factors(_scheme_of(numbers, layer), layer, "pre_quant_scale", (layer.depth,))


def _scheme_of(numbers: ModelOptConfig, layer: StoredLayer) -> Scheme:
    algorithm, rows = numbers.algorithm, layer.rows
    by_row = ((rows,), (rows, 1))
    match algorithm:
        case "FP8":
            return fp8_scheme(layer, MARK, ((), (1,)), row_group=0, group=0)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return fp8_scheme(layer, MARK, by_row, row_group=1, group=0)
        case "MXFP8":
            shape = (rows, -(-layer.depth // numbers.group))
            return fp8_scheme(layer, MARK, (shape,), row_group=1, group=numbers.group, exponents=True)
        case "W4A16_AWQ":
            return _four_bits(layer, numbers.group)
        case "W8A16" | "W8A8_SQ_PER_CHANNEL":
            has_activations = algorithm == "W8A8_SQ_PER_CHANNEL"
            return int8_scheme(layer, MARK, layer.shaped(MARK, *by_row), int8_activations=has_activations)
        case _:
            one = "weight_scale_2" if algorithm in NVFP4 else None
            return fp4_scheme(layer, "weight", numbers.group, one, divides=False)


def _four_bits(layer: StoredLayer, group: int) -> Scheme:
    if layer.rows % 2 or layer.depth % group:
        layer.refuse(
            f"ModelOpt's 4-bit integers need an even number of rows and whole groups of {group} inputs"
        )
    return Scheme(
        stored=(
            Stored("weight", (layer.rows // 2, layer.depth), ("U8",)),
            Stored(MARK, (layer.rows, layer.depth // group), FLOATS),
        ),
        codes=Packing(4, "rows", word_bits=8, is_signed=True),
        scale_kind=layer.kind(MARK),
        group=group,
    )


def recognise(section: HfConfig) -> Format:
    """Return the format of a config's ``quantization_config``, or of ``quantization`` in ``hf_quant_config.json``."""
    inner = section.section("quantization") if section.has("quantization") else section
    left_out = word_list(inner, "exclude_modules", "ignore")
    usual, by_name = None, {}
    if inner.values.get("quant_algo") != MIXED:
        usual = _numbers(inner)
    else:
        layers = inner.section("quantized_layers")
        if not layers.values:
            raise inner.wrong("quantized_layers", "an object with the quantization of each layer")
        by_name = {name: _numbers(layers.section(name)) for name in layers.values}
    words = in_words("modelopt", (usual, *by_name.values()))
    return Format("modelopt", words, MARK, partial(_scheme, usual, by_name, left_out), IGNORED)


def _numbers(section: HfConfig) -> ModelOptConfig:
    algorithm = section.values.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ConfigError(
            f"{section.path}: {section.inside}quant_algo {algorithm!r:.40} of ModelOpt is not supported; supported:"
            f" {', '.join(ALGORITHMS)}"
        )
    if algorithm == "W4A16_AWQ":
        return ModelOptConfig(algorithm, section.whole("group_size", 1, MOST_GROUP, 128))
    group = GROUPS.get(algorithm, 0)
    return ModelOptConfig(algorithm, section.whole("group_size", group, group, group) if group else 0)
