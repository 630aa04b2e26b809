"""ModelOpt (NVIDIA): 8-bit floats with a scale for each tensor, and 4-bit floats (NVFP4).

FP8    weight fp8 [rows, depth]          weight_scale: one number
NVFP4  weight uint8 [rows, depth / 2]    weight_scale fp8 [rows, depth / 16], multiplied by weight_scale_2: one number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quintet.executor.cards.card import ModelCard
from quintet.executor.quant.formats.floats import fp4_scheme, fp8_scheme
from quintet.executor.quant.formats.modules import word_list
from quintet.executor.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.weights.header import Entry
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

ALGORITHMS = ("FP8", "NVFP4")


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """A `Format`."""

    algorithm: str
    group: int
    left_out: tuple[str, ...]
    """Patterns of names, ``*`` for anything."""
    name: Quantization = "modelopt"
    mark: str = "weight_scale"
    takes_quantization: bool = False
    ignored: Sequence[str] = (
        "*.input_scale",
        "*.k_scale",
        "*.v_scale",
        "*.k_proj.output_scale",
        "*.v_proj.output_scale",
    )

    @property
    def words(self) -> str:
        """See `Format`."""
        kind = (
            "8-bit floats, a scale for each tensor"
            if self.algorithm == "FP8"
            else f"4-bit floats, groups of {self.group}"
        )
        return f"modelopt: {kind}"

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        return sum(entry.num_bytes for entry in contents.values())

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        if layer.is_plain(self.mark) or any(
            fnmatchcase(name, each) for name in layer.names for each in self.left_out
        ):
            return None
        if self.algorithm == "FP8":
            return fp8_scheme(layer, self.mark, ((), (1,)), row_group=0, group=0)
        return fp4_scheme(layer, "weight", self.group, "weight_scale_2", divides=False)


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format of a card's ``quantization_config``, or of the ``quantization`` in a ``hf_quant_config.json``."""
    inner = section.section("quantization") if section.has("quantization") else section
    algorithm = inner.values.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"{card.path}: {inner.inside}quant_algo is {algorithm!r:.40}, which is not read of ModelOpt; these load:"
            f" {', '.join(ALGORITHMS)}"
        )
    left_out: tuple[str, ...] = ()
    for key in ("exclude_modules", "ignore"):
        left_out += word_list(inner.values.get(key), section.path, inner.inside + key)
    return ModelOpt(algorithm, inner.whole("group_size", 16, 16, 16), left_out)
