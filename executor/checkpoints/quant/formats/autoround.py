"""AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023).

It saves tensors of GPTQ (zero points minus one only if ``packing_format`` names auto_gptq) or AWQ. Floats use tensors
of compressed-tensors and FP8:

mx_fp, nv_fp   4 bits: weight_packed, weight_scale, for nv_fp weight_global_scale; mx_fp of 8 bits: weight, weight_scale
fp, fp8        8 bits: weight, and weight_scale, or weight_scale_inv for blocks

Bits can differ between layers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from quintet.executor.checkpoints.quant.formats import awq, fp8, gptq
from quintet.executor.checkpoints.quant.formats.modules import compiled
from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp4_scheme, fp8_scheme
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

USUAL = "auto_round:auto_gptq"
RAW_ZEROS = ("", "gptqmodel", "exllamav2", "triton", "tritonv2")
"""Suffixes of ``auto_round`` for zero points without offset."""
FLOAT_BITS = 16
MICROSCALED = {("mx_fp", 4): 32, ("mx_fp", 8): 32, ("nv_fp", 4): 16}
"""Group size by kind and bits."""


_EXPRESSION = re.compile(r"[*+?^$()\[\]{}|\\]")
"""Signs of a regular expression."""

NAME: Quantization = "auto-round"
MARK = "weight_scale"


def _microscaled(
    kind: str, bits: int, left_out: tuple[re.Pattern[str], ...], layer: StoredLayer
) -> Scheme | None:
    """See `Format.scheme`: floats with group scales."""
    is_left_out = any(pattern.search(name) for pattern in left_out for name in layer.names)
    if layer.is_plain(MARK) or is_left_out or layer.is_dummy_head:
        return None
    group = MICROSCALED[kind, bits]
    if bits == 4:
        one = "weight_global_scale" if kind == "nv_fp" else None
        return fp4_scheme(layer, "weight_packed", group, one, divides=True)
    shape = (layer.rows, -(-layer.depth // group))
    return fp8_scheme(layer, MARK, (shape,), row_group=1, group=group, exponents=True)


def recognise(section: HfConfig) -> Format:
    kind = section.values.get("data_type") or "int"
    packing = section.values.get("packing_format") or section.values.get("backend") or USUAL
    if not isinstance(kind, str) or not isinstance(packing, str):
        raise section.wrong("packing_format", f"a string such as {USUAL!r}, with a data_type")
    if section.has("rotation_config"):
        raise ConfigError(
            f"{section.path}: {section.inside}rotation_config is not supported (inputs rotated at run time):"
            " quantize the model again without rotations"
        )
    return _integers(section, packing) if kind.startswith("int") else _floats(section, kind, packing)


def _floats(section: HfConfig, kind: str, packing: str) -> Format:
    bits = section.whole("bits", 1, FLOAT_BITS, 8)
    micro = kind[:5]
    if "e5m3" not in packing and (micro, bits) in MICROSCALED:
        others = _others(section, gptq.USUAL)
        scheme = partial(_microscaled, micro, bits, tuple(pattern for pattern, its in others if its is None))
        words = f"auto-round: {bits}-bit floats ({micro}), groups of {MICROSCALED[micro, bits]}"
        return Format(NAME, words, MARK, scheme, ("*.input_global_scale", "*.input_scale"))
    if kind.startswith("fp") and bits == 8:
        group = section.values.get("group_size")
        if (
            isinstance(group, list)
            and len(group) == 2
            and all(type(size) is int and size > 0 for size in group)
        ):
            return fp8.of(NAME, (group[0], group[1]))
        return fp8.of(NAME, None)
    raise ConfigError(
        f"{section.path}: {section.inside}data_type is {kind!r:.40} of {bits} bits ({packing!r:.60}); supported:"
        " int, mx_fp (4, 8), nv_fp (4), fp (8): export as W4A16, MXFP4, NVFP4 or FP8_BLOCK"
    )


def _integers(section: HfConfig, packing: str) -> Format:
    if "awq" in packing:
        return replace(awq.recognise(section), name=NAME)
    name = packing.removeprefix("auto_round").removeprefix(":")
    if name not in RAW_ZEROS and "gptq" not in name:
        raise ConfigError(
            f"{section.path}: {section.inside}packing_format {packing!r:.40} is not supported; export with the format"
            " 'auto_round', 'auto_gptq' or 'auto_awq'"
        )
    if section.whole("act_bits", 1, 32, FLOAT_BITS) < FLOAT_BITS:
        format_ = "export integer weights with integer activations in the format 'llm_compressor'"
        raise section.wrong("act_bits", f"{FLOAT_BITS}: {format_}")
    numbers = gptq.numbers_of(section, gptq.USUAL)
    return gptq.of(
        NAME,
        numbers,
        ("*.g_idx",),
        zero_offset=0 if name in RAW_ZEROS else 1,
        of_output_layer=section.flag("lm_head", False),
        others=_others(section, numbers),
    )


def _others(section: HfConfig, usual: gptq.GptqConfig) -> gptq.Others:
    """Return the overrides of ``extra_config``: other bits, or None for unquantized layers.

    A key is a layer's name or the end of it, else a regular expression that is searched in the names.
    """
    named, searched = [], []
    extra = section.section("extra_config")
    for name in extra.values:
        its = extra.section(name)
        left_out = its.has("bits") and its.whole("bits", 1, 32) >= FLOAT_BITS
        numbers = None if left_out else gptq.numbers_of(its, usual)
        if _EXPRESSION.search(name):
            searched.append((compiled(f".*(?:{name})", section.path, extra.inside.rstrip(".")), numbers))
        else:
            named.append((re.compile(rf"(?:.*\.)?{re.escape(name)}$"), numbers))
    return [*named, *searched]
