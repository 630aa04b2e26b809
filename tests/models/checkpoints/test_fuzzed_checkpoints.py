"""Checkpoints with invalid files: each is rejected in one line, or is a model that computes.

The seed determines all draws.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
import transformers
from tests.models.checkpoints.invalid_values import (
    INVALID_VALUES,
    SMALL,
    invalid_value,
    load_and_run,
    without_hf_config,
)

from quintet.wire.model_files import ITEM_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return without_hf_config(tmp_path)


def checkpoint(folder: Path, dtype: torch.dtype) -> bytes:
    """Write a config and its weights; return the weights' file."""
    hf_config = {**SMALL, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(hf_config))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config)).to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(hf_config))
    return (folder / "model.safetensors").read_bytes()


def with_an_error(draw: random.Random, whole: bytes) -> bytes:
    """Return a safetensors file with an error in its header or its length, or without one."""
    (size,) = struct.unpack("<Q", whole[:8])
    kind = draw.choice(["nothing", "entry", "entry", "entry", "names", "bytes", "cut", "length"])
    if kind == "bytes":
        changed = bytearray(whole)
        for _ in range(draw.choice([1, 3, 20])):
            changed[draw.randrange(8 + size)] = draw.randrange(256)
        return bytes(changed)
    if kind == "cut":
        return whole[: draw.randrange(len(whole))]
    if kind == "length":
        return (
            struct.pack("<Q", draw.choice([0, 1, 2, size - 1, size + 1, len(whole), 1 << 40, (1 << 64) - 1]))
            + whole[8:]
        )
    header, tensors = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    if kind == "names":
        header.pop(name)
        if draw.random() < 0.6:
            header[draw.choice(["lm_head.weight", "x", "", "\ud800", name + ".1", "__metadata__"])] = entry
    elif kind == "entry":
        key = draw.choice(["dtype", "dtype", "shape", "shape", "data_offsets", "all"])
        if key == "dtype":
            entry[key] = draw.choice([*ITEM_BYTES, "F4", "bf16", *INVALID_VALUES])
        elif key == "all":
            header[name] = draw.choice(INVALID_VALUES)
        elif draw.random() < 0.5:
            entry[key] = draw.choice(
                [entry[key][::-1], [*entry[key], 1], entry[key][:1], [0, 0], *INVALID_VALUES]
            )
        else:
            at = draw.randrange(len(entry[key]))
            entry[key][at] = invalid_value(draw, entry[key][at])
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def fuzz_checkpoints(folder: Path, seeds: range) -> tuple[int, int]:
    """Try a checkpoint of each seed; return the numbers of rejected and of computed ones."""
    refused = computed = 0
    wholes = [checkpoint(folder, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for seed in seeds:
        draw = random.Random(seed)
        path = folder / "model.safetensors"
        path.write_bytes(with_an_error(draw, draw.choice(wholes)))
        index = folder / "model.safetensors.index.json"
        index.unlink(missing_ok=True)
        if draw.random() < 0.2:
            names = draw.choice(
                [
                    {"x": path.name},
                    {"x": "absent"},
                    {"x": "../" + path.name},
                    *({"x": one} for one in INVALID_VALUES),
                ]
            )
            index.write_text(
                json.dumps(
                    draw.choice(
                        [{"weight_map": names}, {"weight_map": names}, {}, draw.choice(INVALID_VALUES)]
                    )
                )
            )
        try:
            refusal = load_and_run(
                folder, draw.choice([4, 16]), quantization=draw.choice(["none", "none", "int8"])
            )
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        refused, computed = refused + (refusal is not None), computed + (refusal is None)
    return refused, computed


def test_invalid_checkpoint_is_rejected_or_computes(folder: Path) -> None:
    refused, computed = fuzz_checkpoints(folder, range(100))
    assert refused > 40 and computed > 10


@pytest.mark.whole
@pytest.mark.parametrize("part", range(4))
def test_many_invalid_checkpoints(folder: Path, part: int) -> None:
    fuzz_checkpoints(folder, range(1000 + 500 * part, 1500 + 500 * part))
