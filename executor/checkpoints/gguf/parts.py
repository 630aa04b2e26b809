"""Files of a GGUF model: one, or the parts of a split model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quintet.executor.checkpoints.gguf.header import GgufHeader, Tensor, Value, read_header
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import GGUF, part_paths


@dataclass(frozen=True, slots=True)
class GgufParts:
    """Headers of all files of a model."""

    headers: tuple[GgufHeader, ...]

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.headers[0].path

    @property
    def metadata(self) -> dict[str, Value]:
        """Metadata of the first file, which describes the model."""
        return self.headers[0].metadata

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, file by file."""
        for header in self.headers:
            yield from header.tensors.items()


def read_parts(path: Path) -> GgufParts:
    """Read the headers of a model. Raises `ConfigError` for a part that is missing or belongs to another model."""
    headers = tuple(map(read_header, part_paths(path)))
    first = headers[0]
    count = first.metadata.get("split.count", 0)
    if count not in (0, 1) and count != len(headers):
        raise ConfigError(
            f"{first.path}: split.count is {count!r:.40}; all parts must be in one folder and named"
            f" NAME-00001-of-{count!r:0>5.5}{GGUF} and so on"
        )
    if len(headers) > 1:
        _check_together(headers)
    return GgufParts(headers)


def _check_together(headers: tuple[GgufHeader, ...]) -> None:
    seen: dict[str, Path] = {}
    for number, header in enumerate(headers):
        for key, due in (("split.no", number), ("split.count", len(headers))):
            if header.metadata.get(key) != due:
                raise ConfigError(
                    f"{header.path}: {key} is {header.metadata.get(key)!r:.40}, not {due}: of another model or renamed"
                )
        for name in header.tensors:
            if name in seen:
                raise ConfigError(f"{header.path}: tensor {name!r:.80} is also in {seen[name].name}")
            seen[name] = header.path
    total = headers[0].metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise ConfigError(
            f"{headers[0].path}: all parts together have {len(seen)} tensors, not {total!r:.40}"
        )
