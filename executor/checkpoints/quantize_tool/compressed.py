"""Write a checkpoint of compressed-tensors or AutoAWQ: the folder's files, with linear layers in integers of 4 or 8
bits.

Format: the `compressed-tensors` package; `quintet.executor.checkpoints.quant.formats.compressed_tensors` reads it.
Weight-only formats pack words (``pack-quantized``); with 8-bit activations weights are bytes (``int-quantized``).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quintet.executor.backends.platforms.cores import usable_cores
from quintet.executor.checkpoints.quantize_tool.awq import AwqRounded, Division
from quintet.executor.checkpoints.quantize_tool.layers import Layers, layers_of
from quintet.executor.checkpoints.quantize_tool.rounding import Rounded, rounded
from quintet.executor.checkpoints.quantize_tool.targets import Target
from quintet.executor.checkpoints.weights.convert import write_folder
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.load import open_files
from quintet.executor.checkpoints.weights.mapped import DTYPES, WeightFile
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import ITEM_BYTES

Progress = Callable[[int], object]
"""Called with the number of rounded values."""
FORMATS: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float16: "F16"}
_ROWS_OF = 1 << 20
"""Values of a task."""
_KEPT_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned checkpoint."""

    folder: Path
    target: Target
    files: Sequence[WeightFile]
    layers: Layers
    scale_dtype: torch.dtype
    known: Mapping[str, Rounded | AwqRounded]
    """Layers that are already rounded, by weight name."""
    divided: Mapping[str, Division] = field(default_factory=dict)
    """Divisions of other tensors, by name."""
    hf_config: Mapping[str, object] = field(default_factory=dict)
    """The folder's parsed config."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for file in self.outputs() for entry in file.entries.values())

    @property
    def num_numbers(self) -> int:
        """Values of the layers that are rounded."""
        entries = (file.entries for file in self.files)
        return sum(
            math.prod(each[name].shape) for each in entries for name in each if name in self.layers.quantized
        )

    def outputs(self, on_progress: Progress = lambda count: None) -> Iterator[_Output]:
        """Yield the output files, one for each of the folder's."""
        for file in self.files:
            yield _Output(self, file, on_progress)


def plan_of(folder: Path, architecture: str, hf_config: HfConfig, target: Target) -> Plan:
    """Return the plan of a folder. Raises `ConfigError` for layers that the target or the format cannot hold."""
    files = open_files(folder)
    layers = layers_of(architecture, hf_config, files)
    for file in files:
        for name in layers.quantized & file.entries.keys():
            shape = file.entries[name].shape
            if len(shape) != 2:
                raise ConfigError(
                    f"{folder}: {name!r:.80} has the shape {list(shape)}; only matrices can be quantized"
                )
            if target.is_awq and shape[0] % 8:
                raise ConfigError(
                    f"{folder}: {name!r:.80} has {shape[0]} outputs, not a multiple of 8: use --format gptq"
                )
            if target.group and shape[1] % target.group:
                raise ConfigError(
                    f"{folder}: {name!r:.80} has {shape[1]} inputs, not a multiple of {target.group}: use --format int8, or a"
                    " GGUF file in q4_0 or q8_0 (groups of 32)"
                )
    scale_dtype = _scale_dtype_of(files, layers)
    return Plan(folder, target, files, layers, scale_dtype, {}, hf_config=hf_config.values)


class _Output:
    """An output file: a `WeightFile` that makes tensors on access, in the order of ``entries``."""

    def __init__(self, plan: Plan, source: WeightFile, on_progress: Progress) -> None:
        self._plan, self._source, self._on_progress = plan, source, on_progress
        self._made: dict[str, torch.Tensor] = {}
        self.entries: dict[str, Entry] = {}
        self._of: dict[str, str] = {}
        for name in source:
            entry = source.entries[name]
            mine = self._entries(name, entry) if name in plan.layers.quantized else {name: entry}
            self.entries |= mine
            self._of |= dict.fromkeys(mine, name)

    def _entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        (rows, depth), target, stem = entry.shape, self._plan.target, name.removesuffix(".weight")
        groups = depth // target.group if target.group else 1
        if target.is_awq:
            kinds = {"qweight": ("I32", (depth, rows // 8)), "qzeros": ("I32", (groups, rows // 8))}
            return _entries_of(stem, kinds | {"scales": ("F16", (groups, rows))})
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight_scale": (FORMATS[self._plan.scale_dtype], (rows, groups))
        }
        if target.int8_activations:
            shapes["weight"] = "I8", (rows, depth)
        else:
            shapes["weight_packed"] = "I32", (rows, -(-depth * target.bits // 32))
            shapes["weight_shape"] = "I64", (2,)
        return _entries_of(stem, shapes)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file."""
        source = self._of[name]
        if source not in self._plan.layers.quantized:
            tensor = self._source.tensor(source)
            division = self._plan.divided.get(source)
            return tensor if division is None else division.of(tensor)
        if name not in self._made:
            self._make(source)
        return self._made.pop(name)

    def drop(self, name: str) -> None:
        """Release the source of the tensor."""
        self._source.drop(self._of[name])

    def _make(self, name: str) -> None:
        """Make all tensors of a layer."""
        weight, plan, stem = self._source.tensor(name), self._plan, name.removesuffix(".weight")
        its = plan.known.get(name) or self._rounded(name, weight)
        if isinstance(its, AwqRounded):
            self._made |= {f"{stem}.{ending}": tensor for ending, tensor in its.tensors().items()}
            return
        self._made[f"{stem}.weight_scale"] = its.scales
        if plan.target.int8_activations:
            self._made[f"{stem}.weight"] = its.codes
        else:
            self._made[f"{stem}.weight_packed"] = in_words(its.codes, plan.target.bits)
            self._made[f"{stem}.weight_shape"] = torch.tensor(weight.shape)

    def _rounded(self, name: str, weight: torch.Tensor) -> Rounded:
        """Round rows on all cores."""
        plan = self._plan

        def work(part: torch.Tensor) -> Rounded:
            return rounded(part, plan.target, plan.scale_dtype)

        parts = weight.split(max(1, _ROWS_OF // weight.shape[1]))
        found = []
        try:
            with ThreadPoolExecutor(usable_cores(), initializer=partial(torch.set_num_threads, 1)) as pool:
                for each in pool.map(work, parts):
                    found.append(each)
                    self._on_progress(each.codes.numel())
        except ValueError as error:
            raise ConfigError(f"{plan.folder}: tensor {name!r:.90} {error}") from None
        return Rounded(torch.cat([each.codes for each in found]), torch.cat([each.scales for each in found]))


def _entries_of(stem: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    return {
        f"{stem}.{ending}": Entry(kind, shape, 0, math.prod(shape) * ITEM_BYTES[kind])
        for ending, (kind, shape) in shapes.items()
    }


def in_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes ``[rows, depth]``, offset to be non-negative, into words int32 ``[rows, words]``, the first code
    lowest."""
    each, middle = 32 // bits, 1 << (bits - 1)
    padded = torch.nn.functional.pad(codes.to(torch.int32) + middle, (0, -codes.shape[1] % each))
    grouped = padded.view(len(codes), -1, each)
    words = torch.zeros(grouped.shape[:2], dtype=torch.int32)
    for place in range(each):
        words |= grouped[..., place] << (place * bits)
    return words


def section_of(plan: Plan) -> dict[str, Any]:
    """Return the ``quantization_config``."""
    target = plan.target
    left_out = sorted({"lm_head", *(name.removesuffix(".weight") for name in plan.layers.kept)})
    if target.is_awq:
        return {
            "quant_method": "awq",
            "bits": target.bits,
            "group_size": target.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left_out,
        }
    weights = {
        "num_bits": target.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if target.group else "channel",
        "group_size": target.group or None,
        "dynamic": False,
    }
    by_token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": by_token if target.int8_activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if target.int8_activations else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left_out,
    }


def write_compressed(plan: Plan, out: Path, on_progress: Progress) -> None:
    """Write the folder. Raises `ConfigError` for values that cannot be rounded, and OSError."""
    out.mkdir()
    for path in sorted(plan.folder.iterdir()):
        if path.suffix in _KEPT_FILES and path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    if (plan.folder / "additional_chat_templates").is_dir():
        shutil.copytree(plan.folder / "additional_chat_templates", out / "additional_chat_templates")
    config = {**plan.hf_config, "quantization_config": section_of(plan)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_folder(out, plan.outputs(on_progress), len(plan.files))


def _scale_dtype_of(files: Sequence[WeightFile], layers: Layers) -> torch.dtype:
    """Return the number format of scales: the layers' own if it has 16 bits, else bfloat16."""
    kinds = {
        DTYPES[file.entries[name].dtype] for file in files for name in layers.quantized & file.entries.keys()
    }
    return torch.float16 if kinds == {torch.float16} else torch.bfloat16
