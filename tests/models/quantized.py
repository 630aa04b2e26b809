"""Checkpoints in the formats of others, made of a tiny random model by simple rounding, and beside each the model of its numbers.

Everything here is written from the formats, bit by bit, and knows nothing of how the product reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]

SETTINGS = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 192,  # one whole group of 128 and a part of one
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Rounded:
    """A weight ``[rows, depth]`` in codes: its numbers are ``(code - zero) * scale``."""

    codes: Array
    """``[rows, depth]``."""
    scales: Array
    """fp32 of fp16 numbers ``[rows, groups]``."""
    zeros: Array
    """``[rows, groups]``."""
    groups: Array
    """``[depth]``: the group of each input."""

    @property
    def numbers(self) -> Array:
        """fp32 ``[rows, depth]``."""
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return ((self.codes - zeros).astype(np.float32) * scales).astype(np.float32)


def rounded(weight: Array, bits: int, group: int, symmetric: bool, order: Array | None = None) -> Rounded:
    """Round to equal steps. group: 0 for a row; order: which input is the first, the second … of the groups."""
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
    """Pack ``[count, n]`` along the first dimension: a stream of bits for each column, in words of 32, the lowest bit first."""
    count, n = codes.shape
    stream = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(count * bits, n)
    stream = np.concatenate([stream, np.zeros((-len(stream) % 32, n), stream.dtype)])
    each = (stream.reshape(-1, 32, n).astype(np.uint64) << np.arange(32, dtype=np.uint64)[None, :, None]).sum(
        1
    )
    return torch.from_numpy(each.astype(np.uint32).view(np.int32).copy())


def half(array: Array) -> torch.Tensor:
    """Return numbers as fp16, which they are."""
    return torch.from_numpy(array.astype(np.float16))


@dataclass(frozen=True)
class Written:
    """What a format makes of a model's layers."""

    section: Mapping[str, Any]
    """``quantization_config``."""
    tensors: Callable[[str, Array], tuple[Tensors, Array]]
    """From a layer's name and weight to its tensors, by ending, and the numbers that they stand for."""
    output_layer: bool = False
    """Whether it is quantized too."""


def gptq(
    bits: int,
    group: int,
    symmetric: bool,
    by_activations: bool = False,
    version: int = 1,
    output_layer: bool = False,
) -> Written:
    """GPTQ; see the paper's code for the layout. Version 1 stores zeros less one."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        depth = weight.shape[1]
        order = np.random.default_rng(len(name)).permutation(depth) if by_activations else None
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
    """AWQ, for its kernel of many rows or of one."""

    def tensors(name: str, weight: Array) -> tuple[Tensors, Array]:
        its = rounded(weight, 4, group, symmetric=False)
        if version == "gemm":
            turned = [0, 2, 4, 6, 1, 3, 5, 7]  # row of each place in a word

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


def write(
    folder: Path, written: Written, config: transformers.PretrainedConfig | None = None
) -> tuple[Path, Path]:
    """Write a quantized checkpoint and one of the numbers that it stands for; return both folders."""
    torch.manual_seed(1)
    config = config or transformers.LlamaConfig(**SETTINGS)  # type: ignore[arg-type]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    quantized, plain = folder / "quantized", folder / "plain"
    model.save_pretrained(plain)
    kept: Tensors = load_file(plain / "model.safetensors")
    numbers: Tensors = dict(kept)
    for name in [name for name in kept if is_quantized(name, written)]:
        layer = name.removesuffix(".weight")
        its, values = written.tensors(layer, kept.pop(name).numpy())
        kept |= {f"{layer}.{ending}": tensor for ending, tensor in its.items()}
        numbers[name] = torch.from_numpy(np.ascontiguousarray(values))
    card = json.loads((plain / "config.json").read_bytes())
    for where, tensors, section in (
        (quantized, kept, {"quantization_config": written.section}),
        (plain, numbers, {}),
    ):
        where.mkdir(exist_ok=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, where / "model.safetensors"
        )
        (where / "config.json").write_text(json.dumps(card | section))
        (where / "tokenizer.json").write_text("{}")
    return quantized, plain


def is_quantized(name: str, written: Written) -> bool:
    """Whether a tensor of the model is the weight of a linear layer that the format quantizes."""
    if name == "lm_head.weight":
        return written.output_layer
    return name.endswith(("_proj.weight",)) and ".layers." in name
