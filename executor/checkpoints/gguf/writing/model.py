"""Write a model folder as one GGUF file: one tensor at a time, its rows in parallel, with bounded memory.

The caller supplies the tokenizer's metadata.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch

from quintet.executor.backends.platforms.cores import usable_cores
from quintet.executor.checkpoints.gguf.blocks.encode import encode
from quintet.executor.checkpoints.gguf.types import GgmlType
from quintet.executor.checkpoints.gguf.writing.check import check_matches
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, kv_heads_of, usual
from quintet.executor.checkpoints.gguf.writing.layout import (
    ARCHITECTURES,
    CURVES,
    FileTensor,
    HasNoPlace,
    architecture_of,
    laid_out,
    read_tensors,
)
from quintet.executor.checkpoints.gguf.writing.metadata import metadata_of
from quintet.executor.checkpoints.gguf.writing.type_mixes import Mix, Model, type_of
from quintet.executor.checkpoints.weights.load import open_files
from quintet.executor.checkpoints.weights.mapped import DTYPES, WeightFile
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.mtp import NUM_LAYERS
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import read_json

Progress = Callable[[int], object]
"""Called with the number of values written."""
_ROWS_OF = 1 << 20
"""Values of a task: enough to amortise the dispatch, few enough to use all threads."""
ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_FLOATS = ("BF16", "F16", "F32")
_REALS = (
    *("attn_factor", "attn_logit_softcapping", "clamp_kqv", "embedding_scale", "expert_weights_scale"),
    *("factor", "final_logit_softcapping", "freq_base", "freq_base_swa", "layer_norm_epsilon"),
    *("layer_norm_rms_epsilon", "logit_scale", "max_alibi_bias", "residual_scale", "scale"),
    *("yarn_log_multiplier",),
)
"""Suffixes of float keys; readers refuse an integer type, though configs may have 12 for 12.0."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the planned file."""

    laid: FileTensor
    type: GgmlType
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Returns its values; or its blocks as bytes, uint8 ``[…, bytes of a row]``, which are written unchanged."""
    done: Callable[[], object]
    """Called when the source is no longer needed."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.type.num_bytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """A planned file."""

    folder: Path
    hf_config: Config
    arch: str
    metadata: Config
    tensors: tuple[Planned, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without metadata; only the vocabulary is large."""
        return sum(each.num_bytes for each in self.tensors)

    @property
    def padded_bytes(self) -> int:
        """Bytes of all tensors with alignment padding."""
        return sum(gguf.GGUFWriter.ggml_pad(each.num_bytes, ALIGNMENT) for each in self.tensors) + ALIGNMENT

    @property
    def num_numbers(self) -> int:
        """Values of all tensors."""
        return sum(math.prod(each.shape) for each in self.tensors)


def plan_of(folder: Path, mix: Mix, hf_config: Config | None = None) -> GgufPlan:
    """Return the plan of a folder's file. config: None reads the folder's.

    Raises `ConfigError` for a model that GGUF or this writer cannot express.
    """
    given = read_json(folder / "config.json") if hf_config is None else hf_config
    config = usual(given)
    arch = architecture_of(config)
    if arch is None:
        raise ConfigError(
            f"{folder}: model_type {config.get('model_type')!r:.60} is not supported for GGUF output; supported:"
            f" {', '.join(ARCHITECTURES)}. Or use a compressed-tensors format"
        )
    files = {name: file for file in open_files(folder) for name in file}
    for name, file in files.items():
        if file.entries[name].dtype not in _FLOATS:
            raise ConfigError(
                f"{file.path}: tensor {name!r:.80} is {file.entries[name].dtype}; a source in {', '.join(_FLOATS)} is"
                " required: use the unquantized checkpoint"
            )
    try:
        sources, predictors = read_tensors(HfConfig(given, str(folder / "config.json")), arch, files)
        config[NUM_LAYERS] = len(predictors)
        laid = list(laid_out(config, arch, sources, predictors))
        metadata = metadata_of(config, arch)
    except HasNoPlace as error:
        raise ConfigError(
            f"{folder}: GGUF's architecture {arch!r} has no tensor for {error.args[0]!r:.90}"
        ) from None
    except KeyError as error:
        raise ConfigError(
            f"{folder / 'config.json'} has no {error.args[0]!r:.90}, which a file of GGUF's architecture"
            f" {arch!r} requires: add the value to config.json"
        ) from None
    metadata = {f"{arch}.{key}": value for key, value in metadata.items()}
    metadata |= _curves_of(files, config["num_hidden_layers"]) if arch == "apertus" else {}
    metadata["general.file_type"] = int(gguf.LlamaFileType[mix.file_type])
    model = Model(
        num_layers=config["num_hidden_layers"],
        is_tied=all(each.name != "output.weight" for each in laid),
        heads_per_kv=config.get("num_attention_heads", 1) // kv_heads_of(config),
    )
    tensors = []
    for each in laid:
        shape = _shape_of(each, files)
        kind = type_of(mix, each.name, shape, model)
        read, done = partial(_read, each, files), partial(_drop, each, files)
        tensors.append(Planned(each, kind, shape, read, done))
    return GgufPlan(folder, given, arch, metadata, tuple(tensors))


def _curves_of(files: Mapping[str, WeightFile], num_layers: int) -> Config:
    """Return Apertus' activations, layer by layer, under keys without an architecture prefix."""
    found: dict[str, list[float]] = {}
    for ending in CURVES:
        names = [f"model.layers.{index}.mlp{ending}" for index in range(num_layers)]
        missing = next((name for name in names if name not in files), None)
        if missing is not None:
            raise ConfigError(f"tensor {missing!r} is missing: the download may be incomplete")
        found[f"xielu.{ending.rpartition('.')[2]}"] = [float(files[name].tensor(name)) for name in names]
    return dict(found)


def _shape_of(laid: FileTensor, files: Mapping[str, WeightFile]) -> tuple[int, ...]:
    """Return the shape of the converted tensor, computed on the meta device."""
    entries = [files[name].entries[name] for name in laid.sources]
    empty = [torch.empty(each.shape, dtype=DTYPES[each.dtype], device="meta") for each in entries]
    return tuple(laid.make(empty).shape)


def _read(laid: FileTensor, files: Mapping[str, WeightFile]) -> torch.Tensor:
    return laid.make([files[name].tensor(name) for name in laid.sources])


def _drop(laid: FileTensor, files: Mapping[str, WeightFile]) -> None:
    for name in laid.sources:
        files[name].drop(name)


def write_gguf(
    plan: GgufPlan, target: Path, vocabulary: Config, on_progress: Progress = lambda count: None
) -> None:
    """Write the file.

    vocabulary: additional metadata by full key. Raises `ConfigError` for values that its types cannot hold. Raises
    OSError, also for missing space before any tensor is written.
    """
    writer = gguf.GGUFWriter(str(target), plan.arch)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in (plan.metadata | vocabulary).items():
        add_value(writer, key, value)
    for each in plan.tensors:
        kind = gguf.GGMLQuantizationType[each.type.name]
        row_bytes = each.type.num_bytes(each.shape[-1])
        writer.add_tensor_info(
            each.laid.name, (*each.shape[:-1], row_bytes), _BYTES, each.num_bytes, raw_dtype=kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, plan, target, on_progress)
    finally:
        writer.close()


def _write_tensors(writer: Any, plan: GgufPlan, target: Path, on_progress: Progress) -> None:
    file = writer.fout[0]
    os.posix_fallocate(file.fileno(), 0, file.tell() + plan.padded_bytes)
    num_of_rope = sum(
        not each.laid.sources for each in plan.tensors
    )  # the first tensors, which the config needs
    with ThreadPoolExecutor(usable_cores(), initializer=partial(torch.set_num_threads, 1)) as pool:
        for number, each in enumerate(plan.tensors):
            if number == num_of_rope:
                file.flush()
                check_matches(plan.folder, plan.hf_config, target)
            try:
                blocks = _encoded(each, pool, on_progress)
            except ValueError as error:
                raise ConfigError(
                    f"{plan.folder}: tensor {'+'.join(each.laid.sources)!r:.90} {error}"
                ) from None
            writer.write_tensor_data(blocks.numpy())
            each.done()
    file.flush()
    os.ftruncate(file.fileno(), file.tell())
    os.fsync(file.fileno())


_BYTES = torch.empty(0, dtype=torch.uint8).numpy().dtype


def _encoded(planned: Planned, pool: ThreadPoolExecutor, on_progress: Progress) -> torch.Tensor:
    """Return a tensor's bytes."""
    numbers = planned.read()
    if numbers.dtype is torch.uint8:
        return numbers.contiguous()
    depth = planned.shape[-1]
    rows = numbers.reshape(-1, depth)
    out = torch.empty((len(rows), planned.type.num_bytes(depth)), dtype=torch.uint8)
    step = max(1, _ROWS_OF // depth)

    def work(begin: int) -> int:
        part = rows[begin : begin + step]
        encode(part, planned.type, out[begin : begin + step])
        return part.numel()

    for count in pool.map(work, range(0, len(rows), step)):
        on_progress(count)
    return out


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add a metadata value."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int() if key.rpartition(".")[2] in _REALS:
            writer.add_float32(key, float(value))
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case Sequence():
            writer.add_array(key, value)
