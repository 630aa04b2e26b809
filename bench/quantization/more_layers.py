"""Write layers in further formats, like `layers`: HQQ, SqueezeLLM, torchao, ModelOpt, AutoRound, Quark, BitNet."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from bench.quantization.layers import Array, Tensors, Written, eight_bit_floats, gptq, half, rounded, words


def hqq(bits: int, group: int, axis: int = 1, as_floats: bool = False) -> Written:
    """HQQ without its optimization: fractional zero points; a packed number has codes of distant rows."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        size = group or weight.shape[1]
        lines = weight.reshape(-1, size) if axis == 1 else weight.reshape(size, -1)
        low, high = lines.min(axis, keepdims=True), lines.max(axis, keepdims=True)
        scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16).astype(np.float32)
        zeros = (-low / scales).astype(np.float16).astype(np.float32)
        codes = np.clip(np.round(lines / scales + zeros), 0, (1 << bits) - 1).astype(np.int64)
        together, word = (10, np.int32) if bits == 3 else (8 // bits, np.uint8)
        filled = np.concatenate([codes, np.zeros((-len(codes) % together, codes.shape[1]), np.int64)])
        parts = filled.reshape(together, -1, codes.shape[1])
        shifts = bits * np.arange(together - 1, -1, -1)
        kept = torch.from_numpy((parts << shifts[:, None, None]).sum(0).astype(word))
        return {
            "W_q": kept.view(torch.bfloat16) if as_floats else kept,
            "scale": half(scales),
            "zero": half(zeros),
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "packing": torch.tensor(list(b"packed"), dtype=torch.uint8),
        }, ((codes - zeros) * scales).astype(np.float32).reshape(weight.shape)

    inner = {"nbits": bits, "group_size": group or None, "axis": axis, "channel_wise": True}
    config = {"weight_quant_params": inner, "scale_quant_params": None, "offload_meta": False}
    return Written({"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, tensors)


def squeezellm(bits: int, outliers: bool = True, rounds: int = 0) -> Written:
    """SqueezeLLM: a table of quantiles for each row, the largest errors as outliers, and two full rows.

    rounds: iterations of Lloyd's k-means with equal weights; the authors weight by sensitivity of the loss. It begins with
    quantiles of the cube root of a normal density, which is near the optimum (Panter and Dite, "Quantization distortion in
    pulse-count modulation with nonuniform spacing of levels", 1951).
    """
    normal, levels = NormalDist(), [(code + 0.5) / (1 << bits) for code in range(1 << bits)]
    if rounds:
        levels = [normal.cdf(3**0.5 * normal.inv_cdf(level)) for level in levels]

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        table = np.quantile(weight, levels, axis=1).T.astype(np.float32)
        codes = np.abs(weight[..., None] - table[:, None]).argmin(-1)
        for _ in range(rounds):
            for code in range(1 << bits):
                mine = codes == code
                count = mine.sum(1)
                mean = (weight * mine).sum(1) / np.maximum(count, 1)
                table[:, code] = np.where(count > 0, mean, table[:, code])
            codes = np.abs(weight[..., None] - table[:, None]).argmin(-1)
        numbers = np.take_along_axis(table, codes, 1)
        stored = {
            "qweight": words(codes.T, bits),
            "lookup_table": torch.from_numpy(np.ascontiguousarray(table)),
        }
        if not outliers:
            return stored, numbers
        missed = weight - numbers
        sparse = np.where(np.abs(missed) > np.quantile(np.abs(missed), 0.98), missed, 0).astype(np.float32)
        places = np.nonzero(sparse)
        whole = np.array([len(weight) - 1, 1])
        rest = (missed - sparse)[whole].astype(np.float32)
        stored |= {
            "rows": torch.from_numpy(
                np.append(0, np.count_nonzero(sparse, axis=1).cumsum()).astype(np.int32)
            ),
            "cols": torch.from_numpy(places[1].astype(np.int32)),
            "vals": torch.from_numpy(sparse[places]),
            "full_rows": torch.from_numpy(np.ascontiguousarray(rest.T)),
            "full_row_indices": torch.from_numpy(whole.astype(np.int32)),
        }
        numbers = numbers + sparse
        numbers[whole] += rest
        return stored, numbers

    return Written({"quant_method": "squeezellm", "wbits": bits}, tensors)


def torchao(kind: str, group: int = 0, symmetric: bool = True, activations: bool = False) -> Written:
    """torchao's Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor and Int4Tensor, selected by configuration class."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        if kind.startswith("Float8"):
            its, numbers = eight_bit_floats("_weight_scale", (1, 0))(name, weight)
            return {"_weight_qdata": its.pop("weight")} | its, numbers
        bits = 4 if kind.startswith(("Int4", "Intx")) else 8
        its_numbers = rounded(weight, bits, group, symmetric)
        middle = 1 << (bits - 1)
        if not kind.startswith("Int4"):
            return {
                "_weight_qdata": torch.from_numpy((its_numbers.codes - middle).astype(np.int8)),
                "_weight_scale": torch.from_numpy(its_numbers.scales),
                "_weight_zero_point": torch.from_numpy((its_numbers.zeros - middle).astype(np.int8)),
            }, its_numbers.numbers
        nibbles = (its_numbers.codes - middle) & 15
        added = torch.from_numpy((middle - its_numbers.zeros) * its_numbers.scales).bfloat16()
        each = its_numbers.scales[:, its_numbers.groups]
        numbers = (its_numbers.codes - middle) * each + added.float().numpy()[:, its_numbers.groups]
        return {
            "_weight_qdata": torch.from_numpy(
                (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
            ).view(torch.int8),
            "_weight_scale": torch.from_numpy(its_numbers.scales.T),
            "_weight_zero_point": added.T,
        }, numbers.astype(np.float32)

    inner: dict[str, Any] = {"group_size": group} if kind.startswith("Int4") else {}
    if group and not inner:
        inner["granularity"] = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}}
    if not symmetric:
        inner["mapping_type"] = {"_type": "MappingType", "_data": "ASYMMETRIC"}
    quant_type = {"default": {"_type": kind, "_version": 2, "_data": inner}}
    return Written(
        {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": None}, tensors
    )


def modelopt_integers(algorithm: str, group: int = 0, factors: bool = False) -> Written:
    """ModelOpt's integers: 8 bits with one scale per row, or 4 bits of two rows per byte; factors: with scales of inputs."""
    bits = 4 if group else 8

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        its = rounded(weight, bits, group, symmetric=True)
        signed = its.codes - (1 << (bits - 1))
        nibbles = signed & 15
        stored = {
            "weight": torch.from_numpy(
                (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8) if group else signed.astype(np.int8)
            ),
            "weight_scale": torch.from_numpy(its.scales if group else its.scales[:, 0].copy()),
        }
        if not factors:
            return stored, its.numbers
        each = np.linspace(0.5, 2, weight.shape[1]).astype(np.float16)
        return stored | {"pre_quant_scale": half(each)}, its.numbers * each.astype(np.float32)

    section = {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    return Written(section | ({"group_size": group} if group else {}), tensors)


def autoround(packing: str, bits: int = 4, group: int = 64, symmetric: bool = False) -> Written:
    """AutoRound's integers in GPTQ's layout; zero points are minus one with the packing of auto_gptq."""
    plain = gptq(bits, group, symmetric, version=1 if packing.endswith("auto_gptq") else 2)
    section = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
    }
    return Written(section, plain.tensors)


def autoround_floats(kind: str, bits: int, tensors: Callable[[str, Array], tuple[Tensors, Array]]) -> Written:
    """AutoRound's floats, in the format of compressed-tensors."""
    section = {"quant_method": "auto-round", "data_type": kind, "bits": bits, "act_bits": bits}
    return Written(section | {"packing_format": "auto_round:llm_compressor"}, tensors)


def quark_integers(dtype: str, group: int = 0, symmetric: bool = True, activations: bool = False) -> Written:
    """Quark's integers: 8 bits with one scale per row, or 4 bits in AWQ's layout; signed codes have zero points of 0."""
    bits, signed = (8 if dtype == "int8" else 4), dtype.startswith("int")
    turned = [0, 2, 4, 6, 1, 3, 5, 7]  # row of each position in a word

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        its = rounded(weight, bits, group, symmetric)
        middle = (1 << (bits - 1)) if signed else 0
        codes, zeros = its.codes - middle, its.zeros - middle
        if bits == 8:
            return {
                "weight": torch.from_numpy(codes.astype(np.int8)),
                "weight_scale": torch.from_numpy(its.scales[:, 0].copy()),
                "weight_zero_point": torch.from_numpy(zeros[:, 0].astype(np.int8)),
            }, its.numbers

        def in_words(each: Array) -> torch.Tensor:
            placed = (each & 15).reshape(-1, 8, each.shape[1])[:, turned].reshape(each.shape)
            return words(placed, 4).T.contiguous()

        return {
            "weight": in_words(codes),
            "weight_scale": half(its.scales.T),
            "weight_zero_point": in_words(zeros),
        }, its.numbers

    weight = {"dtype": dtype, "qscheme": "per_group" if group else "per_channel", "symmetric": symmetric}
    inputs = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False} if activations else None
    section = {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight | ({"group_size": group} if group else {}),
            "input_tensors": inputs,
        },
        "layer_quant_config": {"*lm_head": {"weight": None}},
        "export": {"pack_method": "reorder"},
    }
    return Written(section, tensors)


def bitnet(divides: bool = True) -> Written:
    """BitNet b1.58: values -1, 0 and 1 in two bits, distant rows in one byte, one scale per tensor."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        mean = np.float32(np.abs(weight).mean())
        codes = np.clip(np.round(weight / mean), -1, 1)
        parts = (codes + 1).astype(np.uint8).reshape(4, -1, weight.shape[1])
        packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
        scale = np.float32(1) / mean if divides else mean
        meant = np.float32(1) / scale if divides else scale
        return {"weight": torch.from_numpy(packed), "weight_scale": torch.tensor([scale])}, codes * meant

    section = {
        "quant_method": "bitnet",
        "linear_class": "bitlinear" if divides else "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None,
    }
    return Written(section, tensors)
