"""compressed-tensors, as LLM Compressor saves it: groups of layers, each with bits, strategy and format.

pack-quantized         weight_packed int32 [rows, words]    weight_scale [rows, groups]   weight_zero_point int32 [words, groups]
int-, naive-quantized  weight int8 [rows, depth]            weight_scale [rows, groups]   weight_zero_point int8 [rows, groups]
float-quantized        weight fp8 [rows, depth]             weight_scale: for the tensor, rows, or blocks
nvfp4-pack-quantized   weight_packed uint8 [rows, depth/2]  weight_scale fp8 [rows, depth/16], divided by weight_global_scale
mxfp4-pack-quantized   weight_packed uint8 [rows, depth/2]  weight_scale uint8 [rows, depth/32], exponents
mxfp8-quantized        weight fp8 [rows, depth]             weight_scale uint8 [rows, depth/32], exponents
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

from quintet.executor.checkpoints.quant.formats.modules import block_size, is_named, word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    MOST_GROUP,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    in_words,
)
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp4_scheme, fp8_scheme, int8_scheme
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

PACKED = "pack-quantized"
INTEGERS = ("int-quantized", "naive-quantized")
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
KNOWN = (PACKED, *INTEGERS, "float-quantized", NVFP4, MXFP4, MXFP8)
_GROUP_OF = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
UNUSED = (
    *("weight_shape", "input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "k_scale", "v_scale", "q_scale"),
)
"""Suffixes of unneeded tensors: activation scales are computed at run time, and
`quintet.executor.checkpoints.quant.kv_scales` reads those of keys and values."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Configuration of a group's layers."""

    format: str
    bits: int
    is_float: bool
    strategy: str
    group: int
    """Group size; 0: the whole row."""
    block: tuple[int, int]
    symmetric: bool
    by_activations: bool
    int8_activations: bool
    fp8_activations: bool

    @property
    def block_of_scales(self) -> tuple[int, int]:
        """Rows and inputs that share a scale; 0: all."""
        return {"tensor": (0, 0), "block": self.block}.get(self.strategy, (1, self.group))

    @property
    def words(self) -> str:
        kind = "floats" if self.is_float else "integers"
        is_grouped = self.strategy in ("group", "tensor_group")
        by = f"groups of {self.group}" if is_grouped else f"a scale for each {self.strategy}"
        marks = "" if self.symmetric else ", zero points"
        return f"{self.bits}-bit {kind}, {by}{marks}{', 8-bit activations' * self.int8_activations}"


Groups = tuple[tuple[tuple[str, ...], GroupConfig], ...]
"""Layers that are quantized alike: names, patterns after ``re:``, or classes of modules; and their configuration."""


def _scheme(groups: Groups, ignore: tuple[str, ...], path: str, layer: StoredLayer) -> Scheme | None:
    if is_named(layer, ignore, path, "ignore"):
        return None
    named = (numbers for targets, numbers in groups if is_named(layer, targets, path, "targets"))
    of_class = (numbers for targets, numbers in groups if "Linear" in targets)
    numbers = next(chain(named, of_class), None)
    if numbers is None or layer.is_plain("weight_scale"):
        return None
    if numbers.format in (NVFP4, MXFP4):
        one = "weight_global_scale" if numbers.format == NVFP4 else None
        return fp4_scheme(layer, "weight_packed", numbers.group, one, divides=True)
    if numbers.is_float:
        row_group, group = numbers.block_of_scales
        return fp8_scheme(
            layer,
            "weight_scale",
            _scale_shapes(layer, numbers),
            row_group=row_group,
            group=group,
            exponents=numbers.format == MXFP8,
            fp8_activations=numbers.fp8_activations and numbers.strategy != "block",
        )
    return _packed(layer, numbers) if numbers.format == PACKED else _integers(layer, numbers)


def _scale_shapes(layer: StoredLayer, numbers: GroupConfig) -> tuple[tuple[int, ...], ...]:
    """Return the allowed shapes of scales."""
    match numbers.strategy:
        case "tensor":
            return ((1,), (), (1, 1))
        case "channel":
            return ((layer.rows, 1), (layer.rows,))
        case "block":
            height, width = numbers.block
            return ((-(-layer.rows // height), -(-layer.depth // width)),)
        case _:
            return ((layer.rows, -(-layer.depth // numbers.group)),)


def _packed(layer: StoredLayer, numbers: GroupConfig) -> Scheme:
    bits, rows, depth = numbers.bits, layer.rows, layer.depth
    shapes = _scale_shapes(layer, numbers)
    stored: tuple[Stored, ...] = (
        Stored("weight_packed", (rows, -(-depth * bits // 32)), ("I32",)),
        Stored("weight_scale", layer.shaped("weight_scale", *shapes), FLOATS),
    )
    if not numbers.symmetric:
        if numbers.strategy == "tensor":
            layer.refuse(
                "one zero point for a whole packed tensor is not supported: use a checkpoint with one for each row or group"
            )
        groups = shapes[0][1]
        stored += (Stored("weight_zero_point", (-(-rows * bits // 32), groups), ("I32",)),)
    is_ordered = numbers.by_activations and layer.contents is not None  # dummy inputs keep their order
    if is_ordered:
        stored += (Stored("weight_g_idx", (depth,), ("I32",), (0, 0)),)
    return Scheme(
        stored=stored,
        codes=Packing(bits, "depth"),
        scale_kind=layer.kind("weight_scale"),
        group=numbers.group,
        row_group=0 if numbers.strategy == "tensor" else 1,
        zeros=None if numbers.symmetric else Packing(bits, "rows"),
        order="weight_g_idx" if is_ordered else None,
    )


def _integers(layer: StoredLayer, numbers: GroupConfig) -> Scheme:
    shapes, zeros = _scale_shapes(layer, numbers), None
    row_group, group = numbers.block_of_scales
    if not numbers.symmetric:
        if numbers.strategy in ("tensor", "block"):
            layer.refuse(
                "zero points of whole tensors or blocks are not supported: use a checkpoint with one for each row or group"
            )
        zeros = Stored("weight_zero_point", layer.shaped("weight_zero_point", *shapes), ("I8",))
    return int8_scheme(
        layer,
        "weight_scale",
        layer.shaped("weight_scale", *shapes),
        group=group,
        row_group=row_group,
        zeros=zeros,
        int8_activations=numbers.int8_activations and numbers.symmetric and not group,
    )


def recognise(section: HfConfig) -> Format:
    _refuse_unsupported(section)
    usual = section.values.get("format") or PACKED
    found = section.section("config_groups")
    groups = tuple(_group(found.section(key), usual) for key in found.values)
    of_kv_alone = not groups and section.has("kv_cache_scheme")
    if not groups and not of_kv_alone:
        raise section.wrong("config_groups", "an object with the groups of layers that are quantized alike")
    ignore = word_list(section, "ignore")
    has_scales = not section.section("kv_cache_scheme").values.get("dynamic")
    mark = "weight_scale" if not of_kv_alone else "k_scale" if has_scales else ""
    words = in_words("compressed-tensors", (numbers for _, numbers in groups))
    if not groups:
        words += "weights as they were, scales of keys and values"
    scheme, ignored = partial(_scheme, groups, ignore, section.path), tuple(f"*.{each}" for each in UNUSED)
    return Format("compressed-tensors", words, mark, scheme, ignored)


def _refuse_unsupported(section: HfConfig) -> None:
    """Refuse sparse weights and transforms."""
    for key in ("sparsity_config", "sparsity_compression_config"):
        sparsity = section.section(key).values.get("format", "dense")
        if sparsity != "dense":
            raise ConfigError(
                f"{section.path}: {section.inside}{key}: sparse weights ({sparsity!r:.40}) are not supported:"
                " use the dense original checkpoint"
            )
    if section.section("transform_config").values.get("config_groups"):
        raise ConfigError(
            f"{section.path}: {section.inside}transform_config is not supported (inputs rotated at run time):"
            " use a checkpoint without transforms, or with rotations folded into the weights"
        )


def _group(section: HfConfig, usual: object) -> tuple[tuple[str, ...], GroupConfig]:
    targets = word_list(section, "targets")
    kind, weights = section.values.get("format") or usual, section.section("weights")
    if not isinstance(kind, str) or kind not in KNOWN:
        raise ConfigError(
            f"{section.path}: {section.inside}format {kind!r:.40} is not supported; supported formats of compressed-tensors"
            f" are {', '.join(KNOWN)}"
        )
    if not weights.values:
        raise section.wrong("weights", "an object: groups that quantize only activations are not supported")
    is_float = weights.word("type", ("int", "float"), "int") == "float"
    bits = weights.whole("num_bits", 2, 8, 8)
    fits = (
        (bits == 4) == (kind in (NVFP4, MXFP4)) and bits in (4, 8)
        if is_float
        else kind in (PACKED, *INTEGERS)
    )
    if not fits or (is_float and kind == PACKED):
        raise ConfigError(
            f"{section.path}: {weights.inside}num_bits is {bits}, of type {'float' if is_float else 'int'}, in the format"
            f" {kind}, is not supported: integers have 2 to 8 bits; floats have 8, or 4 as nvfp4 or mxfp4"
        )
    if kind in _GROUP_OF and weights.whole("group_size", 1, MOST_GROUP, _GROUP_OF[kind]) != _GROUP_OF[kind]:
        raise weights.wrong("group_size", f"{_GROUP_OF[kind]}, as of every {kind}")
    return targets, _numbers(weights, section, kind, bits, is_float)


def _numbers(weights: HfConfig, section: HfConfig, kind: str, bits: int, is_float: bool) -> GroupConfig:
    grouped = weights.values.get("group_size")
    strategy = weights.word("strategy", STRATEGIES, "group" if grouped and grouped != -1 else "tensor")
    group = 0
    if kind in _GROUP_OF:
        strategy, group = "group", _GROUP_OF[kind]
    elif strategy in ("group", "tensor_group"):
        group = max(0, weights.whole("group_size", -1, MOST_GROUP))
    block = (1, 1)
    if strategy == "block":
        block = block_size(weights, "block_structure")
    inputs = section.section("input_activations")
    is_symmetric, kind_of_inputs = inputs.flag("symmetric", True), inputs.values.get("type", "int")
    has_eight = inputs.values.get("num_bits") == 8
    return GroupConfig(
        kind,
        bits,
        is_float,
        "channel" if strategy == "group" and not group else strategy,
        group,
        block,
        symmetric=weights.flag("symmetric", True),
        by_activations=weights.values.get("actorder") in ("group", "dynamic", True),
        int8_activations=has_eight and kind_of_inputs == "int" and is_symmetric,
        fp8_activations=has_eight and kind_of_inputs == "float",
    )
