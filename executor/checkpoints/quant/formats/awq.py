"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023): 4 bits, zero
points.

AutoAWQ's layout ``gemm``; a word has the codes of rows 0 2 4 6 1 3 5 7 of eight:

    qweight  int32 [depth, rows / 8]      qzeros  int32 [groups, rows / 8]      scales  [groups, rows]

Layout ``gemv``; a word has the codes of eight adjacent inputs or groups. Zero points and scales are padded to whole
words:

    qweight  int32 [rows, depth / 8]      qzeros  int32 [rows, words]           scales  [rows, 8 words]
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.executor.checkpoints.quant.formats.modules import is_part_of, word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    groups_in_words,
)
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

MOST_GROUP = 1 << 20
BITS, IN_WORD = 4, 8


@dataclass(frozen=True, slots=True)
class Awq:
    """Layers of one configuration."""

    group: int
    """Group size; 0: the whole row."""
    version: str
    left_out: tuple[str, ...]

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        if layer.is_plain("qweight", is_left_out=layer.is_output_layer or is_part_of(layer, self.left_out)):
            return None
        rows, depth, group = layer.rows, layer.depth, self.group or layer.depth
        if (rows if self.version == "gemm" else depth) % IN_WORD or depth % group:
            layer.refuse(f"AWQ needs whole words of {IN_WORD} codes and whole groups of {group} inputs")
        return (
            self._gemm(layer, depth // group) if self.version == "gemm" else self._gemv(layer, depth // group)
        )

    def _gemm(self, layer: StoredLayer, groups: int) -> Scheme:
        packing = Packing(BITS, "rows", transposed=True, evens_first=True)
        return Scheme(
            stored=(
                Stored("qweight", (layer.depth, layer.rows // IN_WORD), ("I32",)),
                Stored("scales", (groups, layer.rows), FLOATS),
                Stored("qzeros", (groups, layer.rows // IN_WORD), ("I32",)),
            ),
            codes=packing,
            scale_transposed=True,
            scale_kind=layer.kind("scales"),
            group=self.group,
            zeros=packing,
        )

    def _gemv(self, layer: StoredLayer, groups: int) -> Scheme:
        step = 4 if self.group == 32 else 2 if self.group == 64 else 1
        words = (groups + IN_WORD * step - 1) // (IN_WORD * step) * step
        return Scheme(
            stored=(
                Stored("qweight", (layer.rows, layer.depth // IN_WORD), ("I32",)),
                Stored("scales", (layer.rows, words * IN_WORD), FLOATS),
                Stored("qzeros", (layer.rows, words), ("I32",)),
            ),
            codes=Packing(BITS, "depth"),
            scale_kind=layer.kind("scales"),
            group=self.group or layer.depth,
            zeros=Packing(BITS, "depth"),
        )


def recognise(hf_config: HfConfig, section: HfConfig) -> Format:
    """Return the format of a config's ``quantization_config``."""
    return of(section)


def of(section: HfConfig) -> Format:
    """Return the format that a section of a config describes."""
    bits = section.whole(("bits", "w_bit"), 1, 16, BITS)
    if bits != BITS:
        raise section.wrong(("bits", "w_bit"), "4: AutoAWQ saves no other bits")
    key = section.spelling(("version", "checkpoint_format"))
    version = str(section.values.get(key) or "gemm").lower()
    if version not in ("gemm", "gemv"):
        raise ConfigError(
            f"{section.path}: unsupported AWQ {key} {version!r:.40}, a layout for one kernel: use a checkpoint with"
            f" `{key}` 'gemm' or 'gemv'"
        )
    group = section.whole(("group_size", "q_group_size"), -1, MOST_GROUP, 128)
    if group == 0:
        raise section.wrong(("group_size", "q_group_size"), "-1 or a number of columns")
    left_out = word_list(section, "modules_to_not_convert")
    layers = Awq(max(group, 0), version, left_out)
    words = f"awq: 4 bits in {groups_in_words(layers.group)}, zero points, laid out for {version}"
    return Format("awq", words, "qweight", layers.scheme)
