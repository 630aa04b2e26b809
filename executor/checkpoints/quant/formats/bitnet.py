"""BitNet b1.58 (Ma et al., "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits", 2024), as transformers
saves it:

weight        uint8 [rows / 4, depth]   0, 1, 2 for -1, 0, 1; byte i has rows i, i + rows / 4 …, the first in the lowest bits
weight_scale  one number                factor of the product; divisor for ``bitlinear``
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import is_part_of, word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    total_bytes,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig

IN_BYTE = 4
MARK = "weight_scale"


def _scheme(divides: bool, left_out: tuple[str, ...], layer: StoredLayer) -> Scheme | None:
    if is_part_of(layer, left_out) or layer.is_plain(MARK, is_left_out=layer.is_dummy_head):
        return None
    if layer.rows % IN_BYTE:
        layer.refuse(f"BitNet needs a multiple of {IN_BYTE} rows")
    return Scheme(
        stored=(
            Stored("weight", (layer.rows // IN_BYTE, layer.depth), ("U8",)),
            Stored(MARK, layer.shaped(MARK, (1,), ()), FLOATS),
        ),
        codes=Packing(2),
        group=0,
        row_group=0,
        divides=divides,
        decoder="quintet.executor.checkpoints.quant.decode_formats:bitnet",
    )


def _memory_bytes(contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    ternary = {name.removesuffix("_scale") for name in contents if name.endswith(MARK)}
    return total_bytes(contents, {}) + sum(contents[name].num_bytes for name in ternary if name in contents)


def recognise(section: HfConfig) -> Format:
    linear = section.word("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    if section.word("quantization_mode", ("offline", "online"), "offline") == "online":
        raise section.wrong("quantization_mode", "offline: use the packed checkpoint with ternary weights")
    if section.flag("use_rms_norm", False):
        raise section.wrong("use_rms_norm", "false: norms inside linear layers are not supported")
    scheme = partial(_scheme, linear == "bitlinear", word_list(section, "modules_to_not_convert"))
    words = "bitnet: three values, a scale for each tensor"
    return Format("bitnet", words, MARK, scheme, memory_bytes=_memory_bytes)
