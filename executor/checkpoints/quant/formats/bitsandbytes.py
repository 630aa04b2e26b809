"""bitsandbytes, as transformers saves it (Dettmers et al., "QLoRA", 2023, for 4 bits; "LLM.int8()", 2022, for 8).

4 bits  weight uint8 [rows * depth / 2, 1]    two codes in a byte, the first in the high bits, row-major
        weight.absmax [blocks]                fp32, or uint8 scaled by weight.nested_absmax, .nested_quant_map
        weight.quant_map fp32 [16]            value of each code
        weight.quant_state.bitsandbytes__nf4  JSON
8 bits  weight int8 [rows, depth]             SCB fp32 [rows]: 127 times the scales
"""

from __future__ import annotations

import math
from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import is_part_of, word_list
from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, Stored, StoredLayer
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Table of QLoRA's appendix E."""
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
TABLES = {"nf4": NF4, "fp4": tuple(sign * each / 12 for sign in (1, -1) for each in _TWELFTHS)}
"""Values of the codes; a checkpoint stores them too."""
USUAL_BLOCK = 64
NESTED_BLOCK = 256


def _scheme(kind: str, mark: str, left_out: tuple[str, ...], layer: StoredLayer) -> Scheme | None:
    """See `Format.scheme`. kind: ``nf4``, ``fp4`` or ``int8``."""
    if is_part_of(layer, left_out) or layer.is_plain(mark, is_left_out=layer.is_dummy_head):
        return None
    rows, depth = layer.rows, layer.depth
    if kind == "int8":
        codes_and_scales = (Stored("weight", (rows, depth), ("I8",)), Stored("SCB", (rows,), ("F32",)))
        return Scheme(stored=codes_and_scales, scale_factor=1 / 127, scale_kind="F32", group=0)
    count, absmax = rows * depth, layer.entry("weight.absmax")
    blocks = count // USUAL_BLOCK if absmax is None else math.prod(absmax.shape)
    if blocks == 0 or count % blocks or depth % (count // blocks):
        layer.refuse(f"{blocks} bitsandbytes blocks do not divide its rows evenly")
    stored = [Stored("weight", (count // 2, 1), ("U8",))]
    if absmax is not None and absmax.dtype == "U8":
        stored += [
            Stored("weight.absmax", (blocks,), ("U8",)),
            Stored("weight.nested_absmax", (-(-blocks // NESTED_BLOCK),), ("F32",)),
            Stored("weight.nested_quant_map", (256,), ("F32",)),
        ]
    else:
        stored.append(Stored("weight.absmax", (blocks,), ("F32",)))
    if layer.contents is not None:
        stored.append(Stored("weight.quant_map", (16,), ("F32",)))
    state = f"weight.quant_state.bitsandbytes__{kind}"
    described = layer.entry(state)
    if described is not None:
        stored.append(Stored(state, described.shape, ("U8",)))
    return Scheme(
        stored=tuple(stored),
        scale_kind="F32",
        group=count // blocks,
        table=kind,
        decoder="quintet.executor.checkpoints.quant.decode_formats:bitsandbytes",
    )


def recognise(section: HfConfig) -> Format:
    left_out = word_list(section, "llm_int8_skip_modules")
    eight = section.flag(("load_in_8bit", "_load_in_8bit"), False)
    four = section.flag(("load_in_4bit", "_load_in_4bit"), False)
    if eight == four:
        raise ConfigError(
            f"{section.path}: {section.inside}load_in_4bit and load_in_8bit are both {str(four).lower()}; one must be true"
        )
    kind = "int8" if eight else section.word("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    storage = ("uint8", "bfloat16", "float16", "float32")
    if four and section.word("bnb_4bit_quant_storage", storage, "uint8") != "uint8":
        raise section.wrong("bnb_4bit_quant_storage", "uint8: save the model again with that storage")
    mark, of_scale = ("SCB", "row") if kind == "int8" else ("weight.absmax", "block")
    words = f"bitsandbytes: {kind}, a scale for each {of_scale}"
    return Format("bitsandbytes", words, mark, partial(_scheme, kind, mark, left_out), ("*.weight_format",))
