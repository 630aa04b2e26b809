"""Weights of a GGUF file under the model's tensor names, dequantized on access."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from quintet.executor.checkpoints.gguf.blocks.dequantize import PLAIN
from quintet.executor.checkpoints.gguf.common_values import is_in_later_layer
from quintet.executor.checkpoints.gguf.decoder_tensors import recipes_of
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata
from quintet.executor.checkpoints.gguf.header import GgufHeader, Tensor
from quintet.executor.checkpoints.gguf.hf_config import architecture_of
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.tensor_recipes import Recipe, TensorRows, height, height_of
from quintet.executor.checkpoints.gguf.types import GgmlType
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.mapped import read_only_tensor
from quintet.executor.model_config.draft_heads import DRAFT_HEADS
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.model_config.mtp import MtpSpec
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

BLOCKS = ".blocks"
"""Suffix of a layer's name, instead of ``.weight``: its rows as bytes, ``[rows, bytes of a row]``."""
_READ_BY_HF_CONFIG = (
    "rope_freqs.weight",
    "rope_factors_*.weight",
    "blk.*.rope_freqs.weight",
    "blk.*.attn_rot_embd",
)
"""Tensors that the config contains."""


ReadBlocks = Callable[[torch.Tensor, GgmlType, torch.Tensor], None]
"""Dequantizes rows of blocks, uint8 ``[rows, bytes of a row]``, into ``[rows, depth]`` of any floating-point format."""


def open_gguf(path: Path, model: ModelConfig, dtype: torch.dtype, read: ReadBlocks) -> list[GgufFile]:
    """Open the files of a model. ``read`` dequantizes to ``dtype``; other tensors keep their format."""
    parts = read_parts(path)
    family = FAMILIES.get(model.architecture) or DRAFT_HEADS[model.architecture]
    metadata, spec = GgufMetadata.of(parts), family.read(hf_config_of(model))
    assert isinstance(spec, DecoderSpec), spec
    recipes = recipes_of(spec, metadata.tensors, architecture_of(metadata))
    maps = {header.path: _Mapped(header) for header in parts.headers}
    owners = {name: maps[header.path] for header in parts.headers for name in header.tensors}
    num_layers = 0 if isinstance(spec, MtpSpec) else len(spec.layers)
    return [GgufFile(header, recipes, owners, num_layers, dtype, read) for header in parts.headers]


class _Mapped:
    """Mapped bytes of one file. Views keep the map alive; its pages belong to the page cache."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        try:
            with header.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), header.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{header.path}: {error}") from None

    def blocks(self, tensor: Tensor) -> torch.Tensor:
        """Return a tensor's bytes, ``[rows, bytes of a row]``."""
        whole = read_only_tensor(self._map, torch.uint8, tensor.num_bytes, tensor.begin)
        return whole.view(height(tensor.shape) if len(tensor.shape) > 1 else 1, -1)

    def drop(self, tensor: Tensor, rows: slice) -> None:
        """Release the pages that hold only these rows of a tensor."""
        row_bytes = tensor.num_bytes // height(tensor.shape)
        begin = -(-(tensor.begin + rows.start * row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.begin + rows.stop * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class GgufFile:
    """A `quintet.executor.checkpoints.weights.mapped.WeightFile`; for a split model, the tensors with their first rows in
    this file."""

    def __init__(
        self,
        header: GgufHeader,
        recipes: Mapping[str, Recipe],
        owners: Mapping[str, _Mapped],
        num_layers: int,
        dtype: torch.dtype,
        read: ReadBlocks,
    ) -> None:
        self.path = header.path
        self.size = header.size
        self.modified_ns = header.modified_ns
        self.header = header.raw
        self._owners, self._dtype, self._read = owners, dtype, read
        self._recipes = {name: each for name, each in recipes.items() if each.rows[0].name in header.tensors}
        self.entries = {name: self._entry(name) for name in self._recipes}
        for name, recipe in self._recipes.items():
            if name.endswith(".weight") and (entry := self._blocks_entry(recipe)) is not None:
                self.entries[f"{name.removesuffix('.weight')}{BLOCKS}"] = entry
        used = {rows.name for recipe in recipes.values() for rows in recipe.rows}
        for name, tensor in header.tensors.items():
            if name not in used and not _is_unneeded(name, num_layers):
                self.entries[name] = Entry(tensor.type.name, tensor.shape, tensor.begin, tensor.num_bytes)

    @property
    def made(self) -> Collection[str]:
        """Names of the tensors that recipes produce; without blocks and unknown tensors."""
        return self._recipes.keys()

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of their first rows in the file."""
        return iter(sorted(self.entries, key=lambda name: self.entries[name].begin))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a view of the file for an unchanged, unquantized tensor."""
        if name.endswith(BLOCKS):
            rows = self._recipe(name).rows
            raw = [_taken(self._owners[each.name].blocks(self._tensor(each)), each) for each in rows]
            return raw[0] if len(raw) == 1 else torch.cat(raw)
        recipe = self._recipes[name]
        parts = [self._numbers(rows, recipe.computes) for rows in recipe.rows]
        if recipe.finish is not None:
            return recipe.finish(parts).reshape(recipe.shape)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(recipe.shape)

    def drop(self, name: str) -> None:
        """Release the pages of a consumed tensor; a kept view reads them again."""
        for rows in self._recipe(name).rows:
            tensor = self._tensor(rows)
            if isinstance(rows.order, slice):
                self._owners[rows.name].drop(tensor, rows.order)
            elif height_of(rows, tensor) == height(tensor.shape):
                self._owners[rows.name].drop(tensor, slice(0, height(tensor.shape)))

    def _recipe(self, name: str) -> Recipe:
        return self._recipes[f"{name.removesuffix(BLOCKS)}.weight" if name.endswith(BLOCKS) else name]

    def _tensor(self, rows: TensorRows) -> Tensor:
        return self._owners[rows.name].header.tensors[rows.name]

    def _blocks_entry(self, recipe: Recipe) -> Entry | None:
        """Return the entry of a matrix's blocks; None if it is not a matrix of one quantized type."""
        tensors = [self._tensor(rows) for rows in recipe.rows]
        kind = tensors[0].type
        is_matrix = recipe.finish is None and len(recipe.shape) == 2
        if not is_matrix or kind.block == 1 or any(tensor.type != kind for tensor in tensors):
            return None
        row_bytes = kind.num_bytes(recipe.shape[1])
        return Entry(kind.name, (recipe.shape[0], row_bytes), tensors[0].begin, recipe.shape[0] * row_bytes)

    def kind(self, name: str) -> str | None:
        """Return the unquantized number format of a tensor of `made`; None if it is quantized."""
        recipe = self._recipes[name]
        kinds = {self._tensor(rows).type.name for rows in recipe.rows}
        if not kinds <= set(PLAIN):
            return None
        return kinds.pop() if len(kinds) == 1 and not recipe.computes else "F32"

    def _entry(self, name: str) -> Entry:
        recipe = self._recipes[name]
        tensors = [self._tensor(rows) for rows in recipe.rows]
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        return Entry(self.kind(name) or "F32", recipe.shape, tensors[0].begin, num_bytes)

    def _numbers(self, rows: TensorRows, in_single: bool) -> torch.Tensor:
        """Return the values of some rows: ``[rows, depth]``; ``[rows]`` for a vector."""
        tensor, dtype = self._tensor(rows), torch.float32 if in_single else self._dtype
        blocks = self._owners[rows.name].blocks(tensor)
        if len(tensor.shape) == 1:  # a vector: one row in the file, its values are selected
            numbers = _taken(_of_blocks(blocks, tensor, dtype, self._read).view(-1), rows)
        else:
            numbers = _of_blocks(_taken(blocks, rows), tensor, dtype, self._read).view(-1, tensor.shape[-1])
        return numbers.float() if in_single else numbers


def _taken(values: torch.Tensor, rows: TensorRows) -> torch.Tensor:
    if isinstance(rows.order, slice):
        return values[rows.order]
    # index_select copies whole rows; indexing copies byte by byte.
    return values.index_select(0, torch.from_numpy(rows.order))


def _of_blocks(blocks: torch.Tensor, tensor: Tensor, dtype: torch.dtype, read: ReadBlocks) -> torch.Tensor:
    """Return the values of a tensor's bytes, flat."""
    plain = PLAIN.get(tensor.type.name)
    if plain is not None:
        is_even = blocks.data_ptr() % plain.itemsize == 0
        return (blocks if is_even else blocks.clone()).reshape(-1).view(plain)
    depth = blocks.shape[1] // tensor.type.block_bytes * tensor.type.block
    whole = torch.empty(len(blocks), depth, dtype=dtype)
    read(blocks, tensor.type, whole)
    return whole.view(-1)


def _is_unneeded(name: str, num_layers: int) -> bool:
    """Return True if a tensor belongs to the config, or to a layer after these, as those for next-token prediction."""
    is_read_by_config = any(fnmatchcase(name, pattern) for pattern in _READ_BY_HF_CONFIG)
    return is_read_by_config or is_in_later_layer(name, num_layers)
