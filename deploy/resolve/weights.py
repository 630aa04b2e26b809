"""What the safetensors files of a folder hold, read from their headers alone."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from quintet.deploy.resolve.card import read_json
from quintet.wire.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of a checkpoint as stored."""

    num_parameters: int
    size_bytes: int
    num_files: int


def read_weight_facts(folder: Path) -> WeightFacts:
    """Sum up the tensors of a folder without reading them.

    Raises `ConfigError` naming a shard that is listed but missing, or a file whose header makes no sense.
    """
    paths = weight_files(folder)
    num_parameters = size_bytes = 0
    for path in paths:
        for begin, end, shape in _tensors(path):
            num_parameters += math.prod(shape)
            size_bytes += end - begin
    return WeightFacts(num_parameters, size_bytes, len(paths))


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's files: those of the index if there is one, else every ``*.safetensors``."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no `weight_map`")
        paths = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
        for path in paths:
            if not path.is_file():
                raise ConfigError(f"{path.name} is listed in {index} but missing; fetch the model again")
        return paths
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return paths
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.gguf") for path in folder.glob(pattern))
    found = f"; {others[0]} is of a kind Quintet does not read" if others else ""
    raise ConfigError(
        f"{folder} holds no *.safetensors{found}. Convert the weights to safetensors, or try the rest without them: "
        "--load-format dummy or --executor mock"
    )


def _tensors(path: Path) -> list[tuple[int, int, list[int]]]:
    """Return ``(begin, end, shape)`` of each tensor (format: huggingface/safetensors README, "Format")."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            (header_bytes,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                raise ValueError("its header has an impossible size")
            header = json.loads(file.read(header_bytes))
        tensors: list[tuple[int, int, list[int]]] = [
            (*entry["data_offsets"], entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        expected, found = (
            8 + header_bytes + max((end for _, end, _ in tensors), default=0),
            path.stat().st_size,
        )
        if found < expected:
            raise ValueError(f"it has {found} bytes of {expected}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a readable safetensors file: {error}. Fetch it again, or try the rest without weights: "
            "--load-format dummy or --executor mock"
        ) from None
    return tensors
