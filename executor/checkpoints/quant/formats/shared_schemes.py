"""Schemes of 8-bit and 4-bit weights with scales, shared by several formats. Imports no torch."""

from __future__ import annotations

from quintet.executor.checkpoints.quant.formats.scheme import FLOATS, Packing, Scheme, Stored, StoredLayer

FP8 = ("F8_E4M3", "F8_E5M2")
EXPONENTS = ("U8", "F8_E8M0")
_SMALL_EXPONENTS = (118, 122)
"""Dummy exponents: powers of two below 1."""
_SMALL_FLOATS = (0x18, 0x28)
"""Dummy scales in e4m3: small values."""


def fp8_scheme(
    layer: StoredLayer,
    scale: str,
    shapes: tuple[tuple[int, ...], ...],
    *,
    row_group: int,
    group: int,
    exponents: bool = False,
    fp8_activations: bool = False,
    weight: str = "weight",
) -> Scheme:
    """Return the scheme of fp8 weights.

    scale: suffix of the scales, which have one of ``shapes``; exponents: scales are powers of two; fp8_activations:
    see `Scheme`; weight: suffix of the weight.
    """
    shape = layer.shaped(scale, *shapes)
    kinds = EXPONENTS if exponents else (*FLOATS, "F8_E8M0")
    stored_scale = Stored(scale, shape, kinds, _SMALL_EXPONENTS if exponents else None)
    return Scheme(
        stored=(Stored(weight, (layer.rows, layer.depth), FP8, _SMALL_FLOATS), stored_scale),
        weight_kind=layer.kind(weight) or FP8[0],
        scale_kind=layer.kind(scale),
        group=group,
        row_group=row_group,
        fp8_activations=fp8_activations,
    )


def int8_scheme(
    layer: StoredLayer,
    scale: str,
    shape: tuple[int, ...],
    *,
    weight: str = "weight",
    group: int = 0,
    row_group: int = 1,
    zeros: Stored | None = None,
    all_zeros: int | None = None,
    int8_activations: bool = False,
) -> Scheme:
    """Return the scheme of int8 weights. scale: suffix of the scales, of this ``shape``; for the rest see `Scheme`."""
    stored = (Stored(weight, (layer.rows, layer.depth), ("I8",)), Stored(scale, shape, FLOATS))
    return Scheme(
        stored=stored if zeros is None else (*stored, zeros),
        scale_kind=layer.kind(scale),
        group=group,
        row_group=row_group,
        has_int8_zeros=zeros is not None,
        all_zeros=all_zeros,
        int8_activations=int8_activations,
    )


def fp4_scheme(
    layer: StoredLayer,
    weight: str,
    group: int,
    global_scale: str | None,
    *,
    divides: bool,
) -> Scheme:
    """Return the scheme of fp4 weights: two codes in a byte, the first in the low bits, one scale for each group of
    inputs.

    global_scale: suffix of the factor (or divisor) of the fp8 scales; None: scales are exponents.
    """
    if layer.depth % group:
        layer.refuse(f"4-bit floats need a multiple of {group} inputs")
    groups, scale = layer.depth // group, "weight_scale"
    stored: tuple[Stored, ...] = (Stored(weight, (layer.rows, layer.depth // 2), ("U8",)),)
    if global_scale is None:
        stored += (Stored(scale, (layer.rows, groups), EXPONENTS, _SMALL_EXPONENTS),)
    else:
        stored += (
            Stored(scale, (layer.rows, groups), FP8[:1], _SMALL_FLOATS),
            Stored(global_scale, layer.shaped(global_scale, (1,), ()), ("F32",)),
        )
    return Scheme(
        stored=stored,
        codes=Packing(4, "depth"),
        group=group,
        is_fp4=True,
        global_scale=global_scale,
        divides=divides,
        scale_kind=layer.kind(scale),
    )
