"""HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023).

Tensors of its package and of transformers. A weight ``[rows, depth]`` is reshaped: one group in each row (axis 1), or
one value of every group (axis 0).

    W_q    uint8 or int32 [lines, width]         codes of distant lines in one word: see `decode_formats`
    scale                 [groups, 1] or [1, groups]
    zero                  same shape, fractional; a value is (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    groups_in_words,
    in_words,
    total_bytes,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import ITEM_BYTES

STORED_BITS = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1: 1}
"""Bits of a code in the file, by its bits."""
IN_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Codes in a byte by stored bits; in a 32-bit word for 3 bits."""
MARK = "W_q"
LEAST_GROUP = 16
"""Kernels support multiples of this group size."""
BESIDE = (
    *("axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta"),
    *("optimize", "packing", "quant_scale", "quant_zero", "round_zero", "shape", "stores_quant_config"),
    *("unpack_view_dtype", "view_as_float"),
)
"""Metadata tensors of a layer that repeat its configuration and shapes."""


@dataclass(frozen=True, slots=True)
class HqqConfig:
    """Configuration of layers."""

    bits: int
    group: int
    """Group size; 0: the whole row."""
    axis: int

    @property
    def words(self) -> str:
        return f"{self.bits} bits, {groups_in_words(self.group)} along axis {self.axis}"

    @property
    def is_kept(self) -> bool:
        """Return True if kernels multiply the codes: groups must be adjacent inputs."""
        return self.axis == 1 and self.group % LEAST_GROUP == 0

    def growth(self, dtype_bytes: int) -> float:
        """Return the ratio of memory to file size of codes."""
        in_file, in_codes = 32 / 10 if self.bits == 3 else STORED_BITS[self.bits], 4 if self.bits <= 4 else 8
        return (in_codes if self.is_kept else 8 * dtype_bytes) / in_file


def _memory_bytes(all_numbers: Sequence[HqqConfig], contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    growth = max(numbers.growth(dtype_bytes) for numbers in all_numbers)  # upper bound for mixed layers
    if not any(numbers.is_kept for numbers in all_numbers):
        return total_bytes(contents, {"W_q": growth, "scale": 0.0, "zero": 0.0})
    return total_bytes(contents, {"W_q": growth}, ("scale", "zero"))


def _scheme(numbers: HqqConfig, layer: StoredLayer) -> Scheme:
    count, group, bits = layer.rows * layer.depth, numbers.group or layer.depth, STORED_BITS[numbers.bits]
    if count % group:
        layer.refuse(f"HQQ needs a multiple of {group} weights (group_size)")
    lines, width = (count // group, group) if numbers.axis else (group, count // group)
    kind = layer.kind(MARK) or ("I32" if bits == 3 else "U8")
    # The file may view codes as floats.
    octets, size = width * (4 if bits == 3 else 1), ITEM_BYTES.get(kind, 1)
    if bits != 3 and lines % IN_WORD[bits]:
        layer.refuse(f"{lines} lines of {bits} bits do not fill whole bytes")
    by_group = (lines, 1) if numbers.axis else (1, width)
    kinds = ("I32" if bits == 3 else "U8", *FLOATS)
    return Scheme(
        stored=(
            Stored("W_q", (-(-lines // IN_WORD[bits]), octets // size), kinds, (0, 255)),
            Stored("scale", by_group, FLOATS),
            Stored("zero", by_group, FLOATS),
        ),
        codes=Packing(bits),
        scale_kind=layer.kind("scale"),
        group=_adjacent_inputs(layer.depth, group, numbers.axis),
        real_zeros=True,
        decoder="quintet.executor.checkpoints.quant.decode_formats:hqq",
    )


def _adjacent_inputs(depth: int, group: int, axis: int) -> int:
    """Return the number of adjacent inputs that share a scale: 1 along axis 0, and for groups that span rows."""
    if axis == 0 or depth % group:
        return 1
    return 0 if group == depth else group


def tag_of(name: str) -> str:
    """Return a layer's tag in the configuration: ``self_attn.q_proj`` for every layer."""
    words = name.split(".")
    return ".".join(each for each in words if each not in ("model", "layers") and not each.isnumeric())


def recognise(section: HfConfig) -> Format:
    skipped = word_list(section, "skip_modules")
    inner = section.section("quant_config")
    usual, by_tag = None, {}
    if inner.has("weight_quant_params"):
        usual = _numbers(inner)
    else:
        by_tag = {tag: _numbers(inner.section(tag)) for tag in inner.values if inner.has(tag)}
    all_numbers = list(by_tag.values()) if usual is None else [usual]
    if not all_numbers:
        raise section.wrong(
            "quant_config", "an object with weight_quant_params, or one for each kind of layer"
        )

    def scheme(layer: StoredLayer) -> Scheme | None:
        tag = tag_of(layer.name)
        numbers = by_tag.get(tag, usual)
        if numbers is None or tag in skipped or layer.is_plain(MARK):
            return None
        return _scheme(numbers, layer)

    words, ignored = in_words("hqq", all_numbers), tuple(f"*.{each}" for each in BESIDE)
    return Format("hqq", words, MARK, scheme, ignored, partial(_memory_bytes, all_numbers))


def _numbers(section: HfConfig) -> HqqConfig:
    for key in ("scale_quant_params", "zero_quant_params"):
        if section.has(key):
            raise ConfigError(
                f"{section.path}: {section.inside}{key}: quantized scales or zero points are not supported:"
                " use a checkpoint with quant_scale and quant_zero false"
            )
    weight = section.section("weight_quant_params")
    bits = weight.values.get("nbits", 4)
    if type(bits) is not int or bits not in STORED_BITS:
        raise weight.wrong("nbits", f"one of {', '.join(map(str, STORED_BITS))}")
    if not weight.flag("channel_wise", True):
        raise weight.wrong("channel_wise", "true: one scale for a whole tensor is not supported")
    axis = weight.whole("axis", 0, 1, 0)
    group = weight.whole("group_size", 1, MOST_GROUP) if weight.has("group_size") else 0
    if not group and not axis:
        raise weight.wrong("group_size", "a number of inputs if axis is 0")
    return HqqConfig(bits, group, axis)
