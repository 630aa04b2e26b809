"""Sizes and tensors of weight files, read from their headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.checkpoints.weights.header import Entry, read_header
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

if TYPE_CHECKING:
    from quintet.executor.checkpoints.gguf.parts import Parts


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of a stored checkpoint."""

    num_parameters: int | None
    """None for pickled files, which have no header."""
    size_bytes: int
    contents: Mapping[str, Entry] = field(default_factory=dict, compare=False, repr=False)
    """Tensor name -> header entry; empty for pickled files."""


def read_weight_facts(folder: Path) -> WeightFacts:
    """Sum the tensor sizes of a folder, or of a GGUF file, from headers.

    Raises `ConfigError` with the name of a missing shard, or of a file with an invalid header.
    """
    if is_gguf(folder):  # imported only here: numpy starts threads, after which the supervisor must not fork
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return _of_parts(read_parts(folder))
    paths = checkpoint_files(folder)
    if paths[0].suffix in PICKLED:
        return WeightFacts(None, sum(path.stat().st_size for path in paths))
    contents: dict[str, Entry] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                contents |= read_header(path, file, path.stat().st_size).entries
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
    num_parameters = sum(math.prod(entry.shape) for entry in contents.values())
    size_bytes = sum(entry.num_bytes for entry in contents.values())
    return WeightFacts(num_parameters, size_bytes, contents)


def _of_parts(parts: Parts) -> WeightFacts:
    contents = {
        name: Entry(tensor.type.name, tensor.shape, tensor.begin, tensor.num_bytes)
        for name, tensor in parts.tensors()
    }
    num_parameters = sum(math.prod(entry.shape) for entry in contents.values())
    size_bytes = sum(entry.num_bytes for entry in contents.values())
    return WeightFacts(num_parameters, size_bytes, contents)
