"""Convert a GGUF file to a folder of safetensors (``quintet convert``).

Quantized tensors are dequantized and rounded once to the model's number format; others are unchanged. Tensors have
the names of the model's family, and ``config.json`` is the config made from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from quintet.executor.checkpoints.gguf.weights import GgufFile, ReadBlocks, open_gguf
from quintet.executor.checkpoints.gguf.writing.layout import model_type_of
from quintet.executor.checkpoints.weights.convert import write_folder
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.mapped import DTYPES
from quintet.executor.model_config.hf_config import FILE_KEYS
from quintet.wire.config import ModelConfig
from quintet.wire.model_files import ITEM_BYTES

_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
Progress = Callable[[int], object]
"""Called with the number of values of each written tensor."""


class _OutputTensors:
    """Output tensors of one file."""

    def __init__(self, file: GgufFile, usual: str, on_progress: Progress) -> None:
        """usual: number format for quantized tensors."""
        self._file, self._on_progress = file, on_progress
        self.entries: dict[str, Entry] = {}
        for name in file:
            if name in file.made:
                kind, shape = file.kind(name) or usual, file.entries[name].shape
                self.entries[name] = Entry(kind, shape, 0, math.prod(shape) * ITEM_BYTES[kind])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in its output format."""
        tensor = self._file.tensor(name)
        self._on_progress(tensor.numel())
        return tensor.to(DTYPES[self.entries[name].dtype])

    def drop(self, name: str) -> None:
        """Release a written tensor."""
        self._file.drop(name)


class Folder:
    """Plan of an output folder."""

    def __init__(self, path: Path, model: ModelConfig, read: ReadBlocks, on_progress: Progress) -> None:
        """path: the GGUF file of ``model``; read: see `open_gguf`; on_progress: called with the number of values of each
        written tensor."""
        usual = _KINDS[model.dtype]
        files = open_gguf(path, model, DTYPES[usual], read)
        self._files = [_OutputTensors(file, usual, on_progress) for file in files]
        values = json.loads(model.hf_config)
        hf_config = {key: values[key] for key in values if key not in (FILE_KEYS, "quantization_config")}
        kind = model_type_of(model.architecture)
        self._hf_config = hf_config | {"dtype": model.dtype} | ({} if kind is None else {"model_type": kind})

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.num_bytes for file in self._files)

    @property
    def num_numbers(self) -> int:
        """Values of all tensors."""
        return sum(math.prod(entry.shape) for file in self._files for entry in file.entries.values())

    def write(self, out: Path) -> None:
        """Write config and weights into a folder. Raises OSError."""
        (out / "config.json").write_text(json.dumps(self._hf_config, indent=2) + "\n")
        write_folder(out, self._files, len(self._files))
