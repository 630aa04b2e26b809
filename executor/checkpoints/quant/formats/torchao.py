"""torchao, as transformers saves it in safetensors: each attribute of a tensor class is one tensor.

Int8Tensor, IntxUnpackedToInt8Tensor  _weight_qdata int8 [rows, depth]      _weight_scale [rows, groups]   _weight_zero_point int8
Float8Tensor                          _weight_qdata fp8 [rows, depth]       _weight_scale: for the tensor, rows, or blocks
Int4Tensor                            _weight_qdata int8 [rows, depth / 2]  _weight_scale [groups, rows]   _weight_zero_point

The configuration's class name determines the tensor class. Int4Tensor has signed codes; its zero points are floating
point and are added to the products. Older versions wrote ``weight:`` for ``_weight_``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import compiled, is_part_of, word_list
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
    total_bytes,
    with_input_factors,
)
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp8_scheme, int8_scheme
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

INT8, INTX, INT4, FLOAT8 = "8-bit integers", "integers in bytes", "4-bit integers", "8-bit floats"
KNOWN = {
    "Int8WeightOnlyConfig": INT8,
    "Int8DynamicActivationInt8WeightConfig": INT8,
    "Int8StaticActivationInt8WeightConfig": INT8,
    "IntxWeightOnlyConfig": INTX,
    "Int8DynamicActivationIntxWeightConfig": INTX,
    "Float8WeightOnlyConfig": FLOAT8,
    "Float8DynamicActivationFloat8WeightConfig": FLOAT8,
    "Float8StaticActivationFloat8WeightConfig": FLOAT8,
    "Int4WeightOnlyConfig": INT4,
    "Float8DynamicActivationInt4WeightConfig": INT4,
}
"""Kind of weights by the name of the configuration's class."""
WITH_INT8_ACTIVATIONS = ("Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig")
BY_NAMES = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}
"""Classes with configurations by layer name."""
MAPPINGS = ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC")
"""Mappings from codes to values: zero in the middle; the same, with both ends of the range used; with a zero point."""
PLAIN = ("plain", "unpacked_to_int8")
USUAL_GROUP = 128
_SPELLINGS = ("_weight_", "weight:")


@dataclass(frozen=True, slots=True)
class TorchAoConfig:
    """Configuration of layers."""

    kind: str
    group: int
    """Group size; 0: the whole row, or the checkpoint's."""
    symmetric: bool
    int8_activations: bool

    @property
    def words(self) -> str:
        groups = groups_in_words(self.group, "a scale for each row or tensor")
        return f"{self.kind}, {groups}{', 8-bit activations' * self.int8_activations}"


def _memory_bytes(
    all_numbers: Sequence[TorchAoConfig], contents: Mapping[str, Entry], dtype_bytes: int
) -> int:
    zeros = [f"{start}zero_point" for start in _SPELLINGS]
    if any(numbers.kind == INT4 for numbers in all_numbers):
        return total_bytes(contents, {}, [*(f"{start}scale" for start in _SPELLINGS), *zeros])
    are_kept = not all(numbers.symmetric for numbers in all_numbers)
    in_fp32 = are_kept and any(_is_in_fp32_groups(name, entry) for name, entry in contents.items())
    return total_bytes(contents, {} if are_kept else dict.fromkeys(zeros, 0.0), zeros if in_fp32 else ())


def _is_in_fp32_groups(name: str, entry: Entry) -> bool:
    """Return True if a tensor has fp32 scales of groups; kept zero points are then fp32 too."""
    is_scale = name.endswith(tuple(f"{start}scale" for start in _SPELLINGS))
    return is_scale and entry.dtype == "F32" and len(entry.shape) == 2 and entry.shape[1] > 1


def _int8(layer: StoredLayer, numbers: TorchAoConfig, start: str) -> Scheme:
    rows, depth = layer.rows, layer.depth
    scale, zero = f"{start}scale", f"{start}zero_point"
    entry = layer.entry(scale)
    groups = -(-depth // numbers.group) if numbers.group else 1
    if entry is not None and len(entry.shape) == 2 and entry.shape[0] == rows:
        groups = max(1, entry.shape[1])
    by_tensor = entry is not None and entry.shape in ((), (1,), (1, 1)) and rows > 1
    if depth % groups:
        layer.refuse(f"{groups} groups do not divide a row evenly")
    shape = layer.shaped(scale, (rows, groups), (rows,), (), (1,), (1, 1))
    zeros = None
    if layer.entry(zero) is not None or layer.contents is None:
        if by_tensor and not numbers.symmetric:
            layer.refuse(
                "one zero point for a whole tensor is not supported: use a checkpoint with one for each row or group"
            )
        zeros = Stored(zero, shape, ("I8", "I32", "I64"), (0, 0) if numbers.symmetric else None)
    group = 0 if groups == 1 else depth // groups
    return int8_scheme(
        layer,
        scale,
        shape,
        weight=f"{start}qdata",
        group=group,
        row_group=0 if by_tensor else 1,
        zeros=zeros,
        all_zeros=0 if numbers.symmetric else None,
        int8_activations=numbers.int8_activations and numbers.symmetric and not group,
    )


def _float8(layer: StoredLayer, numbers: TorchAoConfig, start: str) -> Scheme:
    rows, scale = layer.rows, f"{start}scale"
    entry = layer.entry(scale)
    shapes: tuple[tuple[int, ...], ...]
    if entry is None or entry.shape in ((rows, 1), (rows,)):
        shapes, row_group, group = ((rows, 1), (rows,)), 1, 0
    elif len(entry.shape) == 2 and entry.shape != (1, 1):
        shapes = (entry.shape,)
        row_group, group = (
            -(-size // max(1, count)) for size, count in zip((rows, layer.depth), entry.shape, strict=True)
        )
    else:
        shapes, row_group, group = ((1, 1), (1,), ()), 0, 0
    return fp8_scheme(layer, scale, shapes, row_group=row_group, group=group, weight=f"{start}qdata")


def _int4(layer: StoredLayer, numbers: TorchAoConfig, start: str) -> Scheme:
    group = numbers.group or USUAL_GROUP
    if layer.depth % group or layer.depth % 2:
        layer.refuse(f"torchao's 4-bit integers need a multiple of {group} inputs")
    by_group = (layer.depth // group, layer.rows)
    return Scheme(
        stored=(
            Stored(f"{start}qdata", (layer.rows, layer.depth // 2), ("I8", "U8")),
            Stored(f"{start}scale", by_group, FLOATS),
            Stored(f"{start}zero_point", by_group, FLOATS),
        ),
        codes=Packing(4),
        scale_kind=layer.kind(f"{start}scale"),
        group=group,
        real_zeros=True,
        decoder="quintet.executor.checkpoints.quant.decode_formats:torchao_int4",
    )


_SCHEMES = {INT4: _int4, FLOAT8: _float8, INT8: _int8, INTX: _int8}
ByName = Sequence[tuple[str | re.Pattern[str], TorchAoConfig | None]]


def _scheme(
    usual: TorchAoConfig | None, by_name: ByName, left_out: tuple[str, ...], layer: StoredLayer
) -> Scheme | None:
    tried = [*layer.names, *(f"{name}.weight" for name in layer.names)]
    named = (
        numbers
        for name, numbers in by_name
        if name in tried or (isinstance(name, re.Pattern) and any(map(name.fullmatch, tried)))
    )
    numbers = None if is_part_of(layer, left_out) or layer.is_dummy_head else next(named, usual)
    start = next((each for each in _SPELLINGS if layer.entry(f"{each}qdata") is not None), _SPELLINGS[0])
    if numbers is None or layer.is_plain(f"{start}qdata"):
        return None
    shapes = (layer.depth,), (1, layer.depth), ()
    scheme = _SCHEMES[numbers.kind](layer, numbers, start)
    return with_input_factors(scheme, layer, f"{start}act_pre_scale", *shapes)


def recognise(section: HfConfig) -> Format:
    if section.flag("include_input_output_embeddings", False):
        raise ConfigError(
            f"{section.path}: {section.inside}include_input_output_embeddings: quantized embeddings are not supported:"
            " quantize the model again without it"
        )
    kind = section.values.get("quant_type")
    if isinstance(kind, str):
        raise ConfigError(
            f"{section.path}: {section.inside}quant_type {kind!r:.40} is of an old version with pickled classes, which are"
            " not supported: quantize the model again with torchao 0.15 or later, and save it as safetensors"
        )
    left_out = word_list(section, "modules_to_not_convert")
    default = section.section("quant_type").section("default")
    usual, by_name = _by_name(section, default)
    all_numbers = [each for each in (usual, *(numbers for _, numbers in by_name)) if each is not None]
    if not all_numbers:
        raise default.wrong("_data", "an object with the quantization of some layers")
    scheme, ignored = (
        partial(_scheme, usual, by_name, left_out),
        ("*act_quant_scale", "*act_quant_zero_point"),
    )
    memory_bytes = partial(_memory_bytes, all_numbers)
    return Format("torchao", in_words("torchao", all_numbers), "qdata", scheme, ignored, memory_bytes)


def _by_name(section: HfConfig, default: HfConfig) -> tuple[TorchAoConfig | None, ByName]:
    """Return the usual configuration, and those of names and patterns of names; None: unquantized."""
    key = BY_NAMES.get(str(default.values.get("_type")))
    if key is None:
        return _numbers(default), ()
    others = default.section("_data").section(key)
    found: dict[str, TorchAoConfig | None] = {
        name: _numbers(others.section(name)) if others.has(name) else None for name in others.values
    }
    usual, place = found.pop("_default", None), others.inside.rstrip(".")
    return usual, [
        (compiled(name[3:], section.path, place) if name.startswith("re:") else name, numbers)
        for name, numbers in found.items()
    ]


def _numbers(section: HfConfig) -> TorchAoConfig:
    kind, inner = section.values.get("_type"), section.section("_data")
    if not isinstance(kind, str) or kind not in KNOWN:
        raise ConfigError(
            f"{section.path}: {section.inside}_type {kind!r:.60} of torchao is not supported; supported: {', '.join(KNOWN)}"
        )
    for key in ("int4_packing_format", "intx_packing_format", "packing_format"):
        packing = inner.values.get(key)
        packing = packing.get("_data") if isinstance(packing, dict) else packing
        if packing is not None and str(packing).lower() not in PLAIN:
            raise ConfigError(
                f"{section.path}: {inner.inside}{key} {packing!r:.40} is a layout for one kernel: quantize the model"
                f" again with the packing format {PLAIN[key[:4] == 'intx']!r}"
            )
    group = 0
    if KNOWN[kind] == INT4:
        group = inner.whole("group_size", 1, MOST_GROUP, USUAL_GROUP)
    else:
        for key in ("granularity", "weight_granularity"):
            if isinstance(inner.values.get(key), dict):
                group = inner.section(key).section("_data").whole("group_size", 0, MOST_GROUP, 0)
    mappings = [_mapping(inner, key) for key in ("mapping_type", "weight_mapping_type")]
    int8_activations = kind in WITH_INT8_ACTIVATIONS and _mapping(inner, "act_mapping_type") != "ASYMMETRIC"
    return TorchAoConfig(KNOWN[kind], group, "ASYMMETRIC" not in mappings, int8_activations)


def _mapping(inner: HfConfig, key: str) -> str:
    """Return the mapping from codes to values."""
    value = inner.values.get(key) or MAPPINGS[0]
    value = value.get("_data") if isinstance(value, dict) else value
    if value not in MAPPINGS:
        raise inner.wrong(key, f"one of {', '.join(MAPPINGS)}")
    return str(value)
