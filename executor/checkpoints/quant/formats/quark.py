"""Quark (AMD): 8-bit floats, microscaled 4-bit floats, integers of 8 and 4 bits.

fp8_e4m3     weight fp8 [rows, depth]         weight_scale: one number, or one for each row
fp4          weight uint8 [rows, depth / 2]   weight_scale uint8 [rows, depth / 32], exponents
int8         weight int8 [rows, depth]        weight_scale, weight_zero_point: one number, or one for each row
int4, uint4  weight int32 [depth, rows / 8]   weight_scale [groups, rows]   weight_zero_point int32 [groups, rows / 8]

With ``pack_method`` reorder, words of int4 and uint4 are AWQ's. Codes and zero points of int4 are signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from quintet.executor.checkpoints.quant.formats.modules import is_named, word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    MOST_GROUP,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    groups_in_words,
    in_words,
)
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp4_scheme, fp8_scheme, int8_scheme
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

KNOWN = {
    "fp8_e4m3": ("per_tensor", "per_channel"),
    "fp4": ("per_group",),
    "int8": ("per_tensor", "per_channel"),
    "int4": ("per_group",),
    "uint4": ("per_group",),
}
"""Supported weight dtypes and their scale granularities."""
GROUP, IN_WORD = 32, 8
MARK, ZEROS = "weight_scale", "weight_zero_point"
IGNORED = ("*.input_*", "*.output_*", "*.k_scale", "*.v_scale", "*.kv_scale")


@dataclass(frozen=True, slots=True)
class QuarkConfig:
    """Configuration of layers."""

    dtype: str
    by: str
    group: int
    symmetric: bool
    int8_activations: bool

    @property
    def words(self) -> str:
        scales = groups_in_words(self.group, f"scales {self.by.replace('_', ' ')}")
        marks = "" if self.symmetric else ", zero points"
        return f"{self.dtype}, {scales}{marks}{', 8-bit activations' * self.int8_activations}"


def _scheme(numbers: QuarkConfig, reorders: bool, layer: StoredLayer) -> Scheme:
    if numbers.dtype == "fp4":
        return fp4_scheme(layer, "weight", GROUP, None, divides=False)
    if numbers.dtype == "int8":
        return _eight_bits(layer, numbers)
    if numbers.group:
        return _four_bits(layer, numbers, reorders)
    row_group, shapes = _scales(layer, numbers)
    return fp8_scheme(layer, MARK, shapes, row_group=row_group, group=0)


def _scales(layer: StoredLayer, numbers: QuarkConfig) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the rows that share a scale (see `Scheme.row_group`) and the allowed shapes of scales."""
    return (1, ((layer.rows,), (layer.rows, 1))) if numbers.by == "per_channel" else (0, ((), (1,)))


def _eight_bits(layer: StoredLayer, numbers: QuarkConfig) -> Scheme:
    row_group, shapes = _scales(layer, numbers)
    if not numbers.symmetric and not row_group:
        layer.refuse(
            "one zero point for a whole tensor is not supported: use a checkpoint with one for each row"
        )
    zeros = None
    if (
        layer.entry(ZEROS) is not None or not numbers.symmetric
    ):  # symmetric weights may have zero points, all 0
        kinds = ("I8", "I32", *FLOATS) if numbers.symmetric else ("I8", "I32")
        zeros = Stored(ZEROS, layer.shaped(ZEROS, *shapes), kinds, (0, 0))
    return int8_scheme(
        layer,
        MARK,
        layer.shaped(MARK, *shapes),
        row_group=row_group,
        zeros=zeros,
        all_zeros=0 if numbers.symmetric else None,
        int8_activations=numbers.int8_activations and numbers.symmetric,
    )


def _four_bits(layer: StoredLayer, numbers: QuarkConfig, reorders: bool) -> Scheme:
    rows, depth, group = layer.rows, layer.depth, numbers.group
    if rows % IN_WORD or depth % group:
        layer.refuse(f"Quark needs whole words of {IN_WORD} codes and whole groups of {group} inputs")
    is_signed = numbers.dtype == "int4"
    packing = Packing(4, "rows", transposed=True, evens_first=reorders, is_signed=is_signed)
    stored: tuple[Stored, ...] = (
        Stored("weight", (depth, rows // IN_WORD), ("I32",)),
        Stored(MARK, (depth // group, rows), FLOATS),
    )
    has_zeros = layer.entry(ZEROS) is not None or not numbers.symmetric
    if has_zeros:
        stored += (Stored(ZEROS, (depth // group, rows // IN_WORD), ("I32",)),)
    return Scheme(
        stored=stored,
        codes=packing,
        scale_transposed=True,
        scale_kind=layer.kind(MARK),
        group=group,
        zeros=packing if has_zeros else None,
        all_zeros=8 if has_zeros and numbers.symmetric and is_signed else None,
    )


def recognise(section: HfConfig) -> Format:
    if any(each is not None for each in section.section("layer_type_quant_config").values.values()):
        raise ConfigError(
            f"{section.path}: {section.inside}layer_type_quant_config (quantization by layer type) is not"
            " supported: use a checkpoint with layer_quant_config"
        )
    layers = section.section("layer_quant_config")
    others = {name: _numbers(layers.section(name)) for name in layers.values}
    usual = _numbers(section.section("global_quant_config"))
    if usual is None and not any(others.values()):
        raise section.wrong("global_quant_config", "an object with the quantization of weights")
    reorders = section.section("export").word("pack_method", ("reorder", "order"), "reorder") == "reorder"
    left_out = word_list(section, "exclude")
    words = in_words("quark", (usual, *others.values()))

    def scheme(layer: StoredLayer) -> Scheme | None:
        named = (its for name, its in others.items() if any(fnmatchcase(each, name) for each in layer.names))
        numbers = next(named, usual)
        if numbers is None or layer.is_plain(MARK) or is_named(layer, left_out, section.path, "exclude"):
            return None
        return _scheme(numbers, reorders, layer)

    return Format("quark", words, MARK, scheme, IGNORED)


def _numbers(section: HfConfig) -> QuarkConfig | None:
    """Return a section's configuration; None if the weights are not quantized."""
    if not section.has("weight"):
        return None
    if isinstance(section.values["weight"], list):
        raise section.wrong("weight", "one object: weights that are quantized twice are not supported")
    weight = section.section("weight")
    dtype, by = weight.values.get("dtype"), weight.values.get("qscheme")
    if not isinstance(dtype, str) or by not in KNOWN.get(dtype, ()):
        raise ConfigError(
            f"{section.path}: {weight.inside}dtype is {dtype!r:.40} with scales {by!r:.40}, which is not supported;"
            " supported: fp8_e4m3 and int8 with scales per_tensor or per_channel, fp4, int4 and uint4 with scales per_group"
        )
    group = weight.whole("group_size", 1, MOST_GROUP, GROUP) if by == "per_group" else 0
    if dtype == "fp4" and group != GROUP:
        raise weight.wrong("group_size", f"{GROUP}, with exponents as scales")
    inputs = section.values.get("input_tensors")
    return QuarkConfig(
        dtype,
        str(by),
        group,
        weight.flag("symmetric", dtype != "uint4") or dtype in ("fp8_e4m3", "fp4"),
        isinstance(inputs, dict) and inputs.get("dtype") == "int8" and inputs.get("symmetric") is not False,
    )
