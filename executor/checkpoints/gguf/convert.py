"""A GGUF file's weights as a folder of safetensors: what ``quintet convert`` writes of one.

What is quantized is made numbers of the model's format, to those that the file stands for, rounded once; what is not stays as it
is. Tensors have the names under which the model's family knows them, so ``config.json`` is the card that was made of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from quintet.executor.checkpoints.gguf.weights import GgufFile, ReadBlocks, open_gguf
from quintet.executor.checkpoints.gguf.writing.layout import model_type_of
from quintet.executor.checkpoints.weights.convert import write_safetensors
from quintet.executor.checkpoints.weights.files import INDEX_FILE, SINGLE_FILE
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.mapped import DTYPES
from quintet.executor.model_config.card import FILE_KEYS
from quintet.wire.config import ModelConfig
from quintet.wire.number_formats import ITEM_BYTES

_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
Told = Callable[[int], object]
"""Hears of each so many numbers that were written."""


class _Numbers:
    """The tensors of one file, as they are written."""

    def __init__(self, file: GgufFile, usual: str, told: Told) -> None:
        """usual: the number format of what is quantized."""
        self._file, self._told = file, told
        self.entries: dict[str, Entry] = {}
        for name in file:
            if name in file.made:
                kind, shape = file.kind(name) or usual, file.entries[name].shape
                self.entries[name] = Entry(kind, shape, 0, math.prod(shape) * ITEM_BYTES[kind])

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor = self._file.tensor(name)
        self._told(tensor.numel())
        return tensor.to(DTYPES[self.entries[name].dtype])

    def drop(self, name: str) -> None:
        """Hear that it was written."""
        self._file.drop(name)


class Folder:
    """A folder that will be written."""

    def __init__(self, path: Path, model: ModelConfig, read: ReadBlocks, told: Told) -> None:
        """path: the file, of which ``model`` was resolved; read: see `open_gguf`."""
        usual = _KINDS[model.dtype]
        files = open_gguf(path, model, DTYPES[usual], read)
        self._files = [_Numbers(file, usual, told) for file in files]
        values = json.loads(model.card)
        card = {key: values[key] for key in values if key not in (FILE_KEYS, "quantization_config")}
        kind = model_type_of(model.architecture)
        self._card = card | {"dtype": model.dtype} | ({} if kind is None else {"model_type": kind})

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(file.num_bytes for file in self._files)

    @property
    def num_numbers(self) -> int:
        """Of all tensors."""
        return sum(math.prod(entry.shape) for file in self._files for entry in file.entries.values())

    def write(self, out: Path) -> None:
        """Write card and weights into a folder. Raises OSError."""
        (out / "config.json").write_text(json.dumps(self._card, indent=2) + "\n")
        count, weight_map = len(self._files), {}
        for number, file in enumerate(self._files, 1):
            name = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            write_safetensors(out / name, file)
            weight_map.update(dict.fromkeys(file.entries, name))
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (out / INDEX_FILE).write_text(json.dumps(index, indent=1))
