"""Write layers in the formats of quantized checkpoints by round-to-nearest, and return their dequantized values.

The writers follow the formats' definitions, and share no code with Quintet's readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""Table of appendix E of the paper."""


@dataclass(frozen=True)
class Rounded:
    """A weight ``[rows, depth]`` as codes; its values are ``(code - zero) * scale``."""

    codes: Array
    """``[rows, depth]``."""
    scales: Array
    """fp16 values as float32 ``[rows, groups]``."""
    zeros: Array
    """``[rows, groups]``."""
    groups: Array
    """``[depth]``: group of each input."""

    @property
    def numbers(self) -> Array:
        """Dequantized values, float32 ``[rows, depth]``."""
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return ((self.codes - zeros).astype(np.float32) * scales).astype(np.float32)


def rounded(weight: Array, bits: int, group: int, symmetric: bool, order: Array | None = None) -> Rounded:
    """Quantize uniformly by round-to-nearest. group: inputs per scale, 0 for a whole row; order: permutation of the inputs."""
    rows, depth = weight.shape
    group = group or depth
    count = -(-depth // group)
    of_input = np.arange(depth) // group
    if order is not None:
        of_input = np.empty(depth, np.int64)
        of_input[order] = np.arange(depth) // group
    most = (1 << bits) - 1
    scales, zeros = np.empty((rows, count), np.float32), np.empty((rows, count), np.int64)
    for g in range(count):
        mine = weight[:, of_input == g]
        if symmetric:
            scales[:, g] = np.abs(mine).max(1) * 2 / most
            zeros[:, g] = 1 << (bits - 1)
        else:
            low, high = np.minimum(mine.min(1), 0), np.maximum(mine.max(1), 0)
            scales[:, g] = (high - low) / most
            scales[:, g] = scales[:, g].astype(np.float16)
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, most)
    scales = np.maximum(scales.astype(np.float16), np.float16(1e-4)).astype(np.float32)
    codes = np.round(weight / scales[:, of_input]) + zeros[:, of_input]
    return Rounded(np.clip(codes, 0, most).astype(np.int64), scales, zeros, of_input)


def words(codes: Array, bits: int) -> torch.Tensor:
    """Pack ``[count, n]`` along the first dimension: each column is a stream of bits in 32-bit words, lowest bit first."""
    count, n = codes.shape
    stream = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(count * bits, n)
    stream = np.concatenate([stream, np.zeros((-len(stream) % 32, n), stream.dtype)])
    each = (stream.reshape(-1, 32, n).astype(np.uint64) << np.arange(32, dtype=np.uint64)[None, :, None]).sum(
        1
    )
    return torch.from_numpy(each.astype(np.uint32).view(np.int32).copy())


def half(array: Array) -> torch.Tensor:
    """Return values, which are exact in fp16, as fp16."""
    return torch.from_numpy(array.astype(np.float16))


@dataclass(frozen=True)
class Written:
    """Writer of a format's layers."""

    section: Mapping[str, Any]
    """``quantization_config``."""
    tensors: Callable[[str, Array], tuple[Tensors, Array]]
    """Function from a layer's name and weight to its tensors, by suffix, and the dequantized values."""
    output_layer: bool = False
    """True if the output layer is quantized too."""


def gptq(
    bits: int,
    group: int,
    symmetric: bool,
    by_activations: bool = False,
    version: int = 1,
    output_layer: bool = False,
) -> Written:
    """GPTQ; the layout is that of the paper's code. Version 1 stores zero points minus one."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        depth = weight.shape[1]
        order = np.random.default_rng(depth).permutation(depth) if by_activations else None
        its = rounded(weight, bits, group, symmetric, order)
        stored_zeros = (its.zeros - (1 if version == 1 else 0)) & ((1 << bits) - 1)
        return {
            "qweight": words(its.codes.T, bits),
            "qzeros": words(stored_zeros, bits).T.contiguous(),
            "scales": half(its.scales.T),
            "g_idx": torch.from_numpy(its.groups.astype(np.int32)),
        }, its.numbers

    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": by_activations,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": output_layer,
    }
    return Written(section, tensors, output_layer)


def awq(group: int, version: str = "gemm") -> Written:
    """AWQ, in the layout of its gemm or gemv kernel."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        its = rounded(weight, 4, group, symmetric=False)
        if version == "gemm":
            turned = [0, 2, 4, 6, 1, 3, 5, 7]  # row of each position in a word

            def in_words(codes: Array) -> torch.Tensor:
                placed = codes.reshape(-1, 8, codes.shape[1])[:, turned].reshape(codes.shape)
                return words(placed, 4).T.contiguous()

            return {
                "qweight": in_words(its.codes),
                "qzeros": in_words(its.zeros),
                "scales": half(its.scales.T),
            }, its.numbers
        step = {32: 4, 64: 2}.get(group, 1)
        wide = -(-its.scales.shape[1] // (8 * step)) * 8 * step
        spare = ((0, 0), (0, wide - its.scales.shape[1]))
        return {
            "qweight": words(its.codes.T, 4).T.contiguous(),
            "qzeros": words(np.pad(its.zeros, spare).T, 4).T.contiguous(),
            "scales": half(np.pad(its.scales, spare)),
        }, its.numbers

    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": None,
    }
    return Written(section, tensors)


def compressed(
    weights: Mapping[str, Any],
    kind: str,
    activations: Mapping[str, Any] | None = None,
    tensors: Callable[[str, Array], tuple[Tensors, Array]] | None = None,
    **more: Any,
) -> Written:
    """compressed-tensors with one group of layers; tensors: writer of formats other than packed integers."""
    bits, group, symmetric = (
        weights["num_bits"],
        weights.get("group_size") or 0,
        weights.get("symmetric", True),
    )
    section = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
        },
        "ignore": ["lm_head"],
    } | more

    def integers(name: str, weight: Array) -> tuple[Tensors, Array]:
        depth = weight.shape[1]
        is_ordered = weights.get("actorder") == "group"
        order = np.random.default_rng(depth).permutation(depth) if is_ordered else None
        its = rounded(weight, bits, group, symmetric, order)
        middle = 1 << (bits - 1)
        if kind == "pack-quantized":
            stored = {
                "weight_packed": words(its.codes.T, bits).T.contiguous(),
                "weight_shape": torch.tensor(weight.shape),
                "weight_scale": half(its.scales),
            }
            if is_ordered:
                stored["weight_g_idx"] = torch.from_numpy(its.groups.astype(np.int32))
            if not symmetric:
                stored["weight_zero_point"] = words(its.zeros, bits)
            return stored, its.numbers
        stored = {
            "weight": torch.from_numpy((its.codes - middle).astype(np.int8)),
            "weight_scale": half(its.scales),
        }
        if not symmetric:
            stored["weight_zero_point"] = torch.from_numpy((its.zeros - middle).astype(np.int8))
        return stored, its.numbers

    return Written(section, tensors or integers)


def eight_bit_floats(
    name_of_scale: str, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, as_list: bool = True
) -> Callable[[str, Array], tuple[Tensors, Array]]:
    """Return a writer of fp8 weights with one scale per block; 0 rows or inputs: all of them."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        rows, depth = weight.shape
        height, width = block[0] or rows, block[1] or depth
        scales = np.empty((-(-rows // height), -(-depth // width)), np.float32)
        of_row, of_input = np.arange(rows) // height, np.arange(depth) // width
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                scales[i, j] = np.abs(weight[of_row == i][:, of_input == j]).max() / 448
        each = scales[of_row][:, of_input]
        stored = torch.from_numpy((weight / each).astype(np.float32)).to(dtype)
        numbers = (stored.float().numpy() * each).astype(np.float32)
        kept = torch.from_numpy(scales if as_list else scales.reshape(-1)[:1].reshape(()))
        return {"weight": stored, name_of_scale: kept}, numbers

    return tensors


def eight_bit_floats_of_powers(name: str, weight: Array) -> tuple[Tensors, Array]:
    """Write MXFP8: fp8 weights with one exponent per 32, the smallest one without overflow."""
    most = np.abs(weight.reshape(len(weight), -1, 32)).max(2)
    exponents = np.ceil(np.log2(np.maximum(most, 1e-30) / 448)).astype(np.int64)
    each = np.repeat((2.0**exponents).astype(np.float32), 32, axis=1)
    stored = torch.from_numpy((weight / each).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy((exponents + 127).astype(np.uint8))
    return {"weight": stored, "weight_scale": scale}, stored.float().numpy() * each


def four_bit_floats(
    group: int, weight_name: str = "weight_packed", global_scale: str | None = None, divides: bool = True
) -> Callable[[str, Array], tuple[Tensors, Array]]:
    """Return a writer of fp4 weights, two per byte, with exponents as scales, or with fp8 scales and a global scale."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        most = np.abs(weight.reshape(len(weight), -1, group)).max(2)
        meant = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        if global_scale is None:
            exponents = np.ceil(np.log2(most / 6)).astype(np.int64)
            scales = (2.0**exponents).astype(np.float32)
            more: Tensors = {"weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))}
        else:
            one = np.float32(448 * 6 / np.abs(weight).max())
            small = torch.from_numpy((most / 6 * one).astype(np.float32)).to(torch.float8_e4m3fn)
            # Division multiplies by the reciprocal, as kernels do: it differs in fp32's last bit.
            inverse = np.float32(1) / one
            scales = (small.float().numpy() * inverse).astype(np.float32)
            stored_one = one if divides else inverse
            more = {"weight_scale": small, global_scale: torch.tensor([stored_one])}
        each = np.repeat(scales, group, axis=1)
        codes = np.abs(weight[..., None] / np.maximum(each, 1e-9)[..., None] - meant).argmin(-1)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        return {weight_name: torch.from_numpy(packed)} | more, meant[codes] * each

    return tensors


def fp8_of_transformers() -> Written:
    """fp8 with one scale per tensor, as transformers writes it (Ministral 3, Devstral 2)."""
    section = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    make = eight_bit_floats("weight_scale_inv", (0, 0), as_list=False)

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        kept, numbers = make(name, weight)
        return kept | {"activation_scale": torch.tensor(0.5)}, numbers

    return Written(section, tensors)


def fp8(block: bool, method: str = "fp8") -> Written:
    """fp8 with DeepSeek's blocks, with one scale per tensor, or with one per row (fbgemm)."""
    if method == "fbgemm_fp8":
        return Written({"quant_method": method}, eight_bit_floats("weight_scale", (1, 0)))
    if block:
        section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        return Written(section, eight_bit_floats("weight_scale_inv", (128, 128)))
    section = {"quant_method": "fp8", "activation_scheme": "static"}
    return Written(section, eight_bit_floats("weight_scale", (0, 0), as_list=False))


def nested_scales(absmax: Array) -> tuple[Array, Tensors, dict[str, Any]]:
    """Quantize bitsandbytes' scales (double quantization); return them, their tensors, and fields of the layer's state."""
    offset = float(absmax.mean())
    table = np.linspace(-1, 1, 256).astype(np.float32)
    outer = np.arange(len(absmax)) // 256
    largest = np.array([np.abs(absmax[outer == i] - offset).max() for i in range(outer[-1] + 1)], np.float32)
    inner = np.abs(((absmax - offset) / largest[outer])[:, None] - table).argmin(1)
    tensors = {
        "weight.absmax": torch.from_numpy(inner.astype(np.uint8)),
        "weight.nested_absmax": torch.from_numpy(largest),
        "weight.nested_quant_map": torch.from_numpy(table),
    }
    meant = (table[inner] * largest[outer] + np.float32(offset)).astype(np.float32)
    return meant, tensors, {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}


def bitsandbytes(kind: str, nested: bool = False) -> Written:
    """bitsandbytes: 4 bits by a table with one scale per 64 weights, or 8 bits with one scale per row."""
    section = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": kind == "int8",
        "load_in_4bit": kind != "int8",
        "bnb_4bit_quant_type": "fp4" if kind == "int8" else kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }
    magnitudes = [0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
    meant = np.array(
        NF4 if kind == "nf4" else [*magnitudes, *(-each for each in magnitudes)], np.float32
    )  # as published

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        if kind == "int8":
            most = np.abs(weight).max(1)
            codes = np.round(weight * (127 / most[:, None])).astype(np.int8)
            numbers = codes.astype(np.float32) * (most * np.float32(1 / 127))[:, None]
            return {
                "weight": torch.from_numpy(codes),
                "SCB": torch.from_numpy(most),
                "weight_format": torch.tensor(0, dtype=torch.uint8),
            }, numbers
        blocks = weight.reshape(-1, 64)
        absmax = np.abs(blocks).max(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "float16",
            "shape": list(weight.shape),
        }
        more: Tensors = {}
        if nested:
            absmax, more, said = nested_scales(absmax)
            state |= said
        codes = np.abs((blocks / absmax[:, None])[..., None] - meant).argmin(-1)
        flat = codes.reshape(-1)
        stored: Tensors = {
            "weight": torch.from_numpy((flat[0::2] << 4 | flat[1::2]).astype(np.uint8)[:, None]),
            "weight.absmax": torch.from_numpy(absmax.astype(np.float32)),
            "weight.quant_map": torch.from_numpy(meant.copy()),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        } | more
        return stored, (meant[codes] * absmax[:, None]).reshape(weight.shape).astype(np.float32)

    return Written(section, tensors)


def is_quantized(name: str, written: Written) -> bool:
    """Return True if a tensor of a Llama is a linear weight that the format quantizes."""
    if name == "lm_head.weight":
        return written.output_layer
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and ".layers." in name


def in_format(written: Written, tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Return a checkpoint's tensors in a format, and the tensors with the dequantized values."""
    kept, numbers = dict(tensors), dict(tensors)
    for name in [name for name in tensors if is_quantized(name, written)]:
        layer = name.removesuffix(".weight")
        its, values = written.tensors(layer, kept.pop(name).float().numpy())
        kept |= {f"{layer}.{ending}": tensor.contiguous() for ending, tensor in its.items()}
        numbers[name] = torch.from_numpy(np.ascontiguousarray(values))
    return kept, numbers
