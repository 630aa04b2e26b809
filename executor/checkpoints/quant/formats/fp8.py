"""fp8 weights as published by DeepSeek and Qwen (a scale for each block) and others (for each tensor or row).

    weight fp8 [rows, depth]    weight_scale_inv [rows / 128, depth / 128]    or    weight_scale: one, or one for each row

``weight_scale_inv`` is a factor despite its name. Tools use either name for any number of scales. Activation scales are
ignored: fp8 activations use one scale for each token.
"""

from __future__ import annotations

from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import block_size, is_part_of, word_list
from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.checkpoints.quant.formats.shared_schemes import fp8_scheme
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.config import Quantization

SCALES = ("weight_scale", "weight_scale_inv")
"""Suffixes of scales."""
IGNORED = (
    *("*.input_scale", "*.input_scale_ub", "*.activation_scale"),
    *("*.k_scale", "*.v_scale", "*.kv_scale"),
)
LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
"""Keys with the names of unquantized layers."""


def _scheme(block: tuple[int, int] | None, left_out: tuple[str, ...], layer: StoredLayer) -> Scheme | None:
    """See `Format.scheme`. block: rows and inputs that share a scale; None: a whole tensor or row."""
    scale = next((each for each in SCALES if layer.entry(each) is not None), SCALES[0])
    if layer.is_plain(scale, is_left_out=is_part_of(layer, left_out) or layer.is_dummy_head):
        return None
    if block is None:
        by_row = ((layer.rows, 1), (layer.rows,))
        shape = layer.shaped(scale, *by_row, (1,), (), (1, 1))
        row_group = 1 if shape in by_row else 0
        return fp8_scheme(layer, scale, (shape,), row_group=row_group, group=0, fp8_activations=True)
    height, width = block
    shapes = ((-(-layer.rows // height), -(-layer.depth // width)),)
    return fp8_scheme(layer, scale, shapes, row_group=height, group=width)


def of(name: Quantization, block: tuple[int, int] | None, left_out: tuple[str, ...] = ()) -> Format:
    """Return a format of 8-bit floats."""
    by = "each tensor or row" if block is None else f"blocks of {block[0]} by {block[1]}"
    words = f"{name}: 8-bit floats, a scale for {by}"
    return Format(name, words, SCALES[0], partial(_scheme, block, left_out), IGNORED)


def recognise(section: HfConfig) -> Format:
    """Return the format of a config with ``quant_method`` ``fp8``."""
    block = block_size(section, "weight_block_size") if section.has("weight_block_size") else None
    return of("fp8", block, word_list(section, *LEFT_OUT))


def recognise_fbgemm(section: HfConfig) -> Format:
    """Return the format of a config with ``quant_method`` ``fbgemm_fp8``: a scale for each row."""
    return of("fbgemm_fp8", None, word_list(section, *LEFT_OUT))
