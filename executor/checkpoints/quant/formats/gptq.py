"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022).

Tensors of AutoGPTQ and GPTQModel:

    qweight  int32 [depth * bits / 32, rows]    codes of adjacent inputs in a word
    qzeros   int32 [groups, rows * bits / 32]   zero points of adjacent rows; minus one in version 1
    scales         [groups, rows]
    g_idx    int32 [depth]                      group of each input; not contiguous with desc_act
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    total_bytes,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """Configuration of the layers, or of some named ones."""

    bits: int
    group: int
    """Group size; 0: the whole row."""
    symmetric: bool
    by_activations: bool
    """True: inputs were sorted by activation before grouping (desc_act)."""

    @property
    def words(self) -> str:
        marks = "" if self.symmetric else ", zero points"
        return f"{self.bits} bits, {groups_in_words(self.group)}{marks}{', in the order of activations' * self.by_activations}"


USUAL = GptqConfig(4, 128, True, False)
"""Configuration of the keys that a section lacks."""


Others = Sequence[tuple[re.Pattern[str], GptqConfig | None]]
"""Name patterns of layers with another configuration, or None for unquantized ones."""


def of(
    name: Quantization,
    numbers: GptqConfig,
    ignored: tuple[str, ...],
    *,
    zero_offset: int,
    of_output_layer: bool,
    others: Others,
    left_out: tuple[str, ...] = (),
) -> Format:
    """Return a format with tensors of GPTQ. zero_offset: 1 if stored zero points are one less than the real ones."""
    growth = {"qweight": (8 if numbers.bits == 8 else 4) / numbers.bits}

    def scheme(layer: StoredLayer) -> Scheme | None:
        named = (its for pattern, its in others if any(map(pattern.match, layer.names)))
        is_left_out = (layer.is_output_layer and not of_output_layer) or is_part_of(layer, left_out)
        its = next(named, None if is_left_out else numbers)
        if layer.is_plain("qweight", is_left_out=its is None):
            return None
        return _scheme(its or numbers, zero_offset, layer)

    def memory_bytes(contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        return total_bytes(contents, growth)

    return Format(name, f"{name}: {numbers.words}", "qweight", scheme, ignored, memory_bytes)


def _scheme(numbers: GptqConfig, zero_offset: int, layer: StoredLayer) -> Scheme:
    bits, rows, depth = numbers.bits, layer.rows, layer.depth
    if depth * bits % 32 or rows * bits % 32:
        layer.refuse(f"GPTQ needs rows and columns of {bits} bits that fill whole 32-bit words")
    groups = -(-depth // (numbers.group or depth))
    # Dummy zero points repeat one byte, and no byte repeats a 3-bit code.
    symmetric = numbers.symmetric and (bits != 3 or layer.contents is not None)
    middle = (1 << (bits - 1)) - zero_offset
    middles = sum(middle << at for at in range(0, 8, bits)) & 255
    stored: tuple[Stored, ...] = (
        Stored("qweight", (depth * bits // 32, rows), ("I32",)),
        Stored("scales", (groups, rows), FLOATS),
        Stored("qzeros", (groups, rows * bits // 32), ("I32",), (middles, middles) if symmetric else None),
    )
    is_ordered = numbers.by_activations and layer.contents is not None  # dummy inputs keep their order
    if is_ordered:
        stored += (Stored("g_idx", (depth,), ("I32",), (0, 0)),)
    return Scheme(
        stored=stored,
        codes=Packing(bits, "depth", transposed=True),
        scale_transposed=True,
        scale_kind=layer.kind("scales"),
        group=numbers.group,
        zeros=Packing(bits, "rows", transposed=True),
        zero_offset=zero_offset,
        all_zeros=1 << (bits - 1) if symmetric else None,
        order="g_idx" if is_ordered else None,
    )


def recognise(section: HfConfig) -> Format:
    version = section.word(
        ("checkpoint_format", "format"),
        ("gptq", "gptq_v2", "gptq_pack", "marlin", "bitblas", "gptq_gemm"),
        "gptq",
    )
    if version not in ("gptq", "gptq_v2") or section.flag("is_marlin_format", False):
        raise ConfigError(
            f"{section.path}: unsupported GPTQ checkpoint_format {version!r}, a layout for one GPU's kernels: use the"
            " original with `checkpoint_format` 'gptq' or 'gptq_v2'"
        )
    numbers = numbers_of(section, USUAL)
    return of(
        "gptq",
        numbers,
        () if numbers.by_activations else ("*.g_idx",),  # without desc_act groups are contiguous
        zero_offset=1 if version == "gptq" else 0,
        of_output_layer=section.flag("lm_head", False),
        others=_others(section, numbers),
        left_out=word_list(section, "modules_to_not_convert"),
    )


def numbers_of(section: HfConfig, usual: GptqConfig) -> GptqConfig:
    """Return a section's configuration; missing keys come from ``usual``."""
    bits = section.whole("bits", 2, 8, usual.bits)
    if bits not in (2, 3, 4, 8):
        raise section.wrong("bits", "2, 3, 4 or 8")
    group = section.whole("group_size", -1, MOST_GROUP, usual.group or -1)
    if group != -1 and group < 1:
        raise section.wrong("group_size", "-1 or a number of columns")
    return GptqConfig(
        bits,
        max(group, 0),
        section.flag(("sym", "symmetric"), usual.symmetric),
        section.flag("desc_act", usual.by_activations) and not section.flag("static_groups", False),
    )


def _others(section: HfConfig, usual: GptqConfig) -> Others:
    """Return GPTQModel's ``dynamic``: patterns with overrides; the prefix ``-:`` marks unquantized layers."""
    found = []
    dynamic = section.section("dynamic")
    for pattern in dynamic.values:
        bare = pattern.removeprefix("-:").removeprefix("+:")
        numbers = None if pattern.startswith("-:") else numbers_of(dynamic.section(pattern), usual)
        found.append((compiled(bare, section.path, f"{section.inside}dynamic"), numbers))
    return found
