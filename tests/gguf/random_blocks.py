"""Models with random blocks of GGML's types as matrices: the GGUF file, and the dequantized numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from quintet.executor.checkpoints.gguf.types import BY_NAME
from quintet.executor.checkpoints.gguf.writing.model import plan_of, write_gguf
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from tests.gguf.files import names_of_ids
from tests.models.random_checkpoints import Logits, Row, batched_logits

Array = np.ndarray[Any, Any]
SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q8_0": (0, None, 0.0),
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}
"""Offset of a block's fp16 scale, offset of the scale of its minima, and their ratio that gives a zero mean."""
WIDENED = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q8_K")
"""Types without a packed form. The scale is first: fp16, or fp32 for Q8_K."""


def random_rows(kind: str, rows: int, depth: int, seed: int) -> Array:
    """Return random blocks, uint8 ``[rows, bytes of a row]``, with magnitudes of a usual matrix."""
    draw = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (rows * depth // block, size), np.uint8)
    at, at_least, ratio = SCALES.get(kind, (0, None, 0.0))
    factor = 0.01
    for _ in range(2):  # the first pass measures the magnitude
        signs = draw.choice(
            [-1.0, 1.0], (len(raw), 1)
        )  # otherwise the codes of some formats have a nonzero mean
        scales = (signs * draw.uniform(0.7, 1.3, (len(raw), 1)) * factor).astype(np.float16)
        its = scales.astype(np.float32 if kind == "Q8_K" else np.float16).view(np.uint8)
        raw[:, at : at + its.shape[1]] = its
        if at_least is not None:
            raw[:, at_least : at_least + 2] = (scales * ratio).astype(np.float16).view(np.uint8)
        factor *= depth**-0.5 / float(numbers_of(kind, raw).std())
    return raw.reshape(rows, -1)


def numbers_of(kind: str, raw: Array) -> Array:
    """Return the numbers that the `gguf` package dequantizes; of Q8_K, which it lacks, those of ggml's ``block_q8_K``."""
    if kind == "Q8_K":
        blocks = raw.reshape(-1, 292)
        codes = blocks[:, 4:260].view(np.int8).astype(np.float32)
        products: Array = codes * blocks[:, :4].copy().view(np.float32)
        return products.reshape(len(raw), -1)
    numbers: Array = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return numbers


def in_blocks(row: Row, kind_of: Callable[[str], str], target: Path) -> Row:
    """Return the row with random blocks as matrices; making the row writes the file to ``target``.

    kind_of: maps a tensor's name in the file to its type; F32 keeps the tensor.
    """

    def make(folder: Path) -> Logits:
        row.make(folder)
        tensors, blocks = load_file(folder / "model.safetensors"), {}
        plan = plan_of(folder, MIXES["f32"])
        places = {each.laid.sources: each for each in plan.tensors}
        for seed, (name, tensor) in enumerate(sorted(tensors.items())):
            if tensor.dim() == 2 and ".experts." not in name and not name.endswith("gate.weight"):
                place = places[name,]
                kind = kind_of(place.laid.name)
                if kind == "F32":
                    continue
                raw = random_rows(kind, *tensor.shape, seed)
                tensors[name] = torch.from_numpy(numbers_of(kind, raw))
                moved = place.laid.make([torch.from_numpy(raw)])
                blocks[name,] = replace(place, type=BY_NAME[kind], read=lambda moved=moved: moved)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        plan = plan_of(folder, MIXES["f32"])
        plan = replace(plan, tensors=tuple(blocks.get(each.laid.sources, each) for each in plan.tensors))
        write_gguf(plan, target, names_of_ids(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        return batched_logits(model.float().eval())

    return Row(make)


def of_gpt_oss(row: Row, target: Path) -> Row:
    """Return a row of gpt-oss with random MXFP4 blocks as experts, as in its files; making it writes the file to ``target``."""

    def make(folder: Path) -> Logits:
        row.make(folder)
        tensors, blocks = load_file(folder / "model.safetensors"), {}
        plan = plan_of(folder, MIXES["f32"])
        for seed, each in enumerate(plan.tensors):
            found = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", each.laid.name)
            if found is None:
                continue
            experts, rows, depth = each.shape
            raw = np.random.default_rng(seed).integers(0, 256, (experts * rows * depth // 32, 17), np.uint8)
            raw[:, 0] = np.random.default_rng(seed).integers(120, 123, len(raw))  # exponents around 2^-7
            raw = raw.reshape(experts, rows, -1)
            numbers = torch.from_numpy(numbers_of("MXFP4", raw)).transpose(1, 2)
            begin = {"gate": 0, "up": 1, "down": 0}[found[2]]
            step = 1 if found[2] == "down" else 2  # gates and ups are interleaved in a folder
            (source,) = each.laid.sources
            tensors[source][..., begin::step] = numbers
            moved = torch.from_numpy(raw)
            blocks[each.laid.name] = replace(each, type=BY_NAME["MXFP4"], read=lambda moved=moved: moved)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        plan = plan_of(folder, MIXES["f32"])
        plan = replace(plan, tensors=tuple(blocks.get(each.laid.name, each) for each in plan.tensors))
        write_gguf(plan, target, names_of_ids(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        return batched_logits(model.float().eval())

    return Row(make)
