"""Quark (AMD): 8-bit floats with a scale for each tensor or row, and microscaled 4-bit floats.

fp8_e4m3  weight fp8 [rows, depth]          weight_scale: one number, or one for each row
fp4       weight uint8 [rows, depth / 2]    weight_scale uint8 [rows, depth / 32], exponents
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.executor.cards.card import ModelCard
from quintet.executor.quant.formats.floats import fp4_scheme, fp8_scheme
from quintet.executor.quant.formats.modules import is_named, word_list
from quintet.executor.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.weights.header import Entry
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

KNOWN = {"fp8_e4m3": ("per_tensor", "per_channel"), "fp4": ("per_group",)}
"""Numbers of weights, and what may share a scale."""
GROUP = 32


@dataclass(frozen=True, slots=True)
class Quark:
    """A `Format`."""

    dtype: str
    by: str
    left_out: tuple[str, ...]
    path: str
    name: Quantization = "quark"
    mark: str = "weight_scale"
    takes_quantization: bool = False
    ignored: Sequence[str] = ("*.input_scale", "*.output_scale", "*.k_scale", "*.v_scale", "*.kv_scale")

    @property
    def words(self) -> str:
        """See `Format`."""
        return f"quark: {self.dtype}, scales {self.by.replace('_', ' ')}"

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        return sum(entry.num_bytes for entry in contents.values())

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        if layer.is_plain(self.mark) or is_named(layer, self.left_out, self.path, "exclude"):
            return None
        if self.dtype == "fp4":
            return fp4_scheme(layer, "weight", GROUP, None, divides=False)
        if self.by == "per_channel":
            return fp8_scheme(layer, self.mark, ((layer.rows,), (layer.rows, 1)), row_group=1, group=0)
        return fp8_scheme(layer, self.mark, ((), (1,)), row_group=0, group=0)


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format that a card's ``quantization_config`` describes."""
    weight = section.section("global_quant_config").section("weight")
    dtype, by = weight.values.get("dtype"), weight.values.get("qscheme")
    if section.section("layer_quant_config").values or section.section("layer_type_quant_config").values:
        raise ConfigError(
            f"{card.path}: {section.inside}layer_quant_config has layers with numbers of their own, which is not read of Quark's:"
            " take a checkpoint with one kind of numbers"
        )
    if not isinstance(dtype, str) or by not in KNOWN.get(dtype, ()):
        raise ConfigError(
            f"{card.path}: {weight.inside}dtype is {dtype!r:.40} with scales {by!r:.40}, which is not read of Quark's; these"
            " load: fp8_e4m3 with scales per_tensor or per_channel, and fp4 with scales per_group"
        )
    if dtype == "fp4" and weight.values.get("group_size", GROUP) != GROUP:
        raise weight.wrong("group_size", f"{GROUP}, whose scales are exponents")
    left_out = word_list(section.values.get("exclude"), section.path, f"{section.inside}exclude")
    return Quark(dtype, str(by), left_out, section.path)
