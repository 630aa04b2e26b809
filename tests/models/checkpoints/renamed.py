"""Checkpoints of one family under the names and the config of another family with the same arithmetic.

For families without a class in transformers: a class of the same arithmetic is the reference. The test covers the reader,
which must find everything under the other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.random_checkpoints import Logits, Row

Stacks = Mapping[str, Sequence[str]]
"""From the suffix after a layer's name to the tensors stacked in it, in this order."""


def renamed(
    row: Row,
    hf_config: Mapping[str, Any],
    names: Sequence[tuple[str, str]] = (),
    stacked: Stacks | None = None,
    whole_hf_config: bool = False,
) -> Row:
    """Return the row with its config's values replaced, tensors stacked, and then renamed by regular expressions in
    order.

    whole_card: ``config`` is the complete config.
    """

    def make(folder: Path) -> Logits:
        logits = row.make(folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for target, parts in (stacked or {}).items():
            for first in [name for name in tensors if name.endswith(parts[0])]:
                stem = first.removesuffix(parts[0])
                rows = [tensors.pop(stem + part) for part in parts]
                tensors[stem + target] = torch.cat(rows)
        for pattern, replacement in names:
            tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, path)
        before = {} if whole_hf_config else json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(before | dict(hf_config)))
        return logits

    return Row(make, close=row.close, quantized=row.quantized)


def with_vision(row: Row, architecture: str, inner: str) -> Row:
    """Return the row as the text model of a multimodal one.

    Its config is nested in another. Its tensors are named ``inner`` instead of ``model.``, next to those of a vision
    part.
    """

    def make(folder: Path) -> Logits:
        logits = row.make(folder)
        path = folder / "model.safetensors"
        head = "language_model." if inner.startswith("language_model.") else ""
        tensors = {
            inner + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
            for name, tensor in load_file(path).items()
        }
        tensors["vision_model.class_embedding"] = torch.zeros(8)
        save_file(tensors, path)
        text = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(
            json.dumps({"architectures": [architecture], "text_config": text})
        )
        return logits

    return Row(make, close=row.close, quantized=row.quantized)
