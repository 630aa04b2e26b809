"""Convert pickled weights to safetensors, file by file (``quintet convert``)."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from quintet.executor.checkpoints.weights.files import INDEX_FILE, PICKLED, SINGLE_FILE, checkpoint_files
from quintet.executor.checkpoints.weights.mapped import Tensors
from quintet.executor.checkpoints.weights.pickled import PickledFile
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

_ALIGNMENT = 64
"""Tensors begin aligned for every number format, so they can be mapped without a copy."""


def convert(folder: Path, report: Callable[[str], object]) -> list[Path]:
    """Write the folder's pickled weights as safetensors into the same folder; return the files. ``report`` gets a line
    for each.

    A file is renamed into place when it is complete. Raises `ConfigError` if there is nothing to convert, or no
    space.
    """
    if is_gguf(folder):
        raise ConfigError(
            f"{folder} is a GGUF file, which needs no conversion; pass an output folder OUT to write safetensors"
        )
    pickled = checkpoint_files(folder)
    if pickled[0].suffix not in PICKLED:
        raise ConfigError(f"{folder} already has safetensors ({pickled[0].name}): nothing to convert")
    count, weight_map, written = len(pickled), {}, []
    total_bytes = 0
    for number, path in enumerate(pickled, 1):
        name = _file_name(number, count)
        file = PickledFile(path)
        try:
            _write_whole(folder / name, lambda temporary, file=file: write_safetensors(temporary, file))  # type: ignore[misc]
        except OSError as error:
            raise ConfigError(f"{folder / name}: {error.strerror or error}") from None
        weight_map.update(dict.fromkeys(file.entries, name))
        total_bytes += sum(entry.num_bytes for entry in file.entries.values())
        written.append(folder / name)
        report(f"{path.name} -> {name}: {len(file.entries)} tensors")
    if count > 1:
        index = _index(weight_map, total_bytes)
        _write_whole(folder / INDEX_FILE, lambda temporary: temporary.write_text(index))
    return written


def write_folder(folder: Path, files: Iterable[Tensors], count: int) -> None:
    """Write ``count`` files as safetensors into a new folder, with their index. Raises OSError."""
    weight_map, total_bytes = {}, 0
    for number, file in enumerate(files, 1):
        name = _file_name(number, count)
        write_safetensors(folder / name, file)
        weight_map.update(dict.fromkeys(file.entries, name))
        total_bytes += sum(entry.num_bytes for entry in file.entries.values())
    if count > 1:
        (folder / INDEX_FILE).write_text(_index(weight_map, total_bytes))


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _index(weight_map: Mapping[str, str], total_bytes: int) -> str:
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=1)


def write_safetensors(path: Path, file: Tensors) -> None:
    """Write all tensors of a file, in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, entry in file.entries.items():
        end = begin + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for name in file.entries:
            flat = file.tensor(name).contiguous().flatten()
            out.write(flat.view(torch.uint8).numpy().data)
            file.drop(name)
        out.flush()
        os.fsync(out.fileno())


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    os.close(descriptor)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
