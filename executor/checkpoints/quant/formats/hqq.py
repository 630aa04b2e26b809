"""HQQ (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023), as its package and transformers
save it: a weight ``[rows, depth]`` is read as rows of one group each (axis 1), or of one number of every group (axis 0).

    W_q    uint8 or int32 [lines, width]         codes of lines that lie far apart in one number: see `decode_hqq`
    scale                 [groups, 1] or [1, groups]
    zero   likewise: no integers                 a number is (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.executor.checkpoints.quant.formats.modules import word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
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
from quintet.executor.model_config.card import ModelCard
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.number_formats import ITEM_BYTES

STORED_BITS = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1: 1}
"""By the bits of a code: those that it takes in the file."""
IN_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""By those: how many codes are in a byte; of 3 bits in 32."""
MOST_GROUP = 1 << 20
LEAST_GROUP = 16
"""Groups that kernels know are multiples of it."""
BESIDE = (
    "axis",
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "group_size",
    "nbits",
    "offload_meta",
    "optimize",
    "packing",
    "quant_scale",
    "quant_zero",
    "round_zero",
    "shape",
    "stores_quant_config",
    "unpack_view_dtype",
    "view_as_float",
)
"""What a layer's file says of it besides, which its configuration and the shapes say as well."""


@dataclass(frozen=True, slots=True)
class HqqConfig:
    """What the configuration says of layers."""

    bits: int
    group: int
    """0: all of a row."""
    axis: int

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.bits} bits, {groups_in_words(self.group)} along axis {self.axis}"

    @property
    def is_kept(self) -> bool:
        """Whether kernels multiply the codes: those whose groups are neighbouring inputs."""
        return self.axis == 1 and self.group % LEAST_GROUP == 0

    def growth(self, dtype_bytes: int) -> float:
        """Return how many times the bytes of the file codes take in memory."""
        in_file, in_codes = 32 / 10 if self.bits == 3 else STORED_BITS[self.bits], 4 if self.bits <= 4 else 8
        return (in_codes if self.is_kept else 8 * dtype_bytes) / in_file


@dataclass(frozen=True, slots=True)
class Hqq:
    """A `Format`."""

    usual: HqqConfig | None
    by_tag: Mapping[str, HqqConfig]
    """By what is left of a layer's name without ``model``, ``layers`` and numbers."""
    skipped: tuple[str, ...]
    name: Quantization = "hqq"
    mark: str = "W_q"
    takes_quantization: bool = False
    ignored: Sequence[str] = tuple(f"*.{each}" for each in BESIDE)

    @property
    def _all(self) -> list[HqqConfig]:
        return [*([self.usual] if self.usual else []), *self.by_tag.values()]

    @property
    def words(self) -> str:
        """See `Format`."""
        return in_words(self.name, self._all)

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        growth = max(numbers.growth(dtype_bytes) for numbers in self._all)  # too much where others have less
        if not any(numbers.is_kept for numbers in self._all):
            return total_bytes(contents, {"W_q": growth, "scale": 0.0, "zero": 0.0})
        return total_bytes(contents, {"W_q": growth}, ("scale", "zero"))

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        tag = tag_of(layer.name)
        numbers = self.by_tag.get(tag, self.usual)
        if numbers is None or tag in self.skipped or layer.is_plain(self.mark):
            return None
        count, group, bits = layer.rows * layer.depth, numbers.group or layer.depth, STORED_BITS[numbers.bits]
        if count % group:
            layer.refuse(f"HQQ's groups of {group} are whole parts of a weight")
        lines, width = (count // group, group) if numbers.axis else (group, count // group)
        kind = layer.kind(self.mark) or ("I32" if bits == 3 else "U8")
        octets, size = width * (4 if bits == 3 else 1), ITEM_BYTES.get(kind, 1)  # of a view as floats, too
        if bits != 3 and lines % IN_WORD[bits]:
            layer.refuse(f"its {lines} lines of {bits} bits do not fill whole bytes, as HQQ's do")
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
            group=_neighbours(layer.depth, group, numbers.axis),
            real_zeros=True,
            decoder="quintet.executor.checkpoints.quant.decode_hqq:decode",
        )


def _neighbours(depth: int, group: int, axis: int) -> int:
    """Return how many neighbouring inputs share a scale: one along axis 0, and where groups go on in the next row."""
    if axis == 0 or depth % group:
        return 1
    return 0 if group == depth else group


def tag_of(name: str) -> str:
    """Return a layer's name as the configuration has it: ``self_attn.q_proj`` of every layer."""
    words = name.split(".")
    return ".".join(each for each in words if each not in ("model", "layers") and not each.isnumeric())


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format that a card's ``quantization_config`` describes."""
    key = "skip_modules"
    skipped = word_list(section.values.get(key), section.path, section.inside + key)
    inner = section.section("quant_config")
    if inner.has("weight_quant_params"):
        return Hqq(_numbers(inner), {}, skipped)
    by_tag = {tag: _numbers(inner.section(tag)) for tag in inner.values if inner.has(tag)}
    if not by_tag:
        raise section.wrong(
            "quant_config", "an object with weight_quant_params, or one for each kind of layer"
        )
    return Hqq(None, by_tag, skipped)


def _numbers(section: ModelCard) -> HqqConfig:
    for key in ("scale_quant_params", "zero_quant_params"):
        if section.has(key):
            raise ConfigError(
                f"{section.path}: {section.inside}{key} has scales or zeros quantized once more, which HQQ itself has given up:"
                " take a checkpoint with quant_scale and quant_zero false"
            )
    weight = section.section("weight_quant_params")
    bits = weight.values.get("nbits", 4)
    if type(bits) is not int or bits not in STORED_BITS:
        raise weight.wrong("nbits", f"one of {', '.join(map(str, STORED_BITS))}")
    if not weight.flag("channel_wise", True):
        raise weight.wrong("channel_wise", "true: one scale for a whole tensor is not read")
    axis = weight.whole("axis", 0, 1, 0)
    group = weight.whole("group_size", 1, MOST_GROUP) if weight.has("group_size") else 0
    if not group and not axis:
        raise weight.wrong("group_size", "a number of inputs where axis is 0")
    return HqqConfig(bits, group, axis)
