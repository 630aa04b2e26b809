"""Low-rank weights of all adapters: their files, in the format of PEFT, and the matrices by layer of the model.

A layer's modules are concatenated: queries, keys and values of one layer have one matrix A with the rows of all three, and one
matrix B with a block for each. All adapters have equal shapes in a layer; smaller ones are padded with zeros.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.packed_weight import ALIGNMENT, PackedWeight
from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.weights.mapped import MappedFile
from quintet.executor.model_config.names import expected_spellings, spellings
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    Json,
    adapter_digest_of,
    read_json,
)

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_NUMBERS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class LowRank:
    """Matrices of one module: it adds ``x @ a.T @ b.T`` to its result."""

    a: torch.Tensor
    """``[rank, inputs]``"""
    b: torch.Tensor
    """fp32 ``[outputs, rank]``, times the adapter's scale"""


def read_adapter(adapter: AdapterConfig) -> dict[str, LowRank]:
    """Return the matrices of each module, by its name in the model. Raises `ConfigError`, also if the files have changed.

    A restarted executor must have the weights of the lost one: requests continue, and KV back ends hold keys and values.
    """
    folder = Path(adapter.path)
    if adapter_digest_of(folder) != adapter.digest:
        raise ConfigError(
            f"LoRA adapter {adapter.name!r}: the files in {folder} have changed since the server started; put the former ones"
            " back, or restart the server"
        )
    hf_config, file = read_json(folder / ADAPTER_CONFIG), MappedFile(folder / ADAPTER_WEIGHTS)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in file.entries.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None or len(entry.shape) != 2 or entry.dtype not in _NUMBERS:
            raise ConfigError(
                f"{file.path}: tensor {name!r:.120} {list(entry.shape)!s:.80} ({entry.dtype}) is not supported; supported are"
                f" matrices lora_A.weight and lora_B.weight of linear layers in {', '.join(_NUMBERS)}"
            )
        pairs.setdefault(found[1], {})[found[2]] = file.tensor(name)
    if not pairs:
        raise ConfigError(f"{file.path} has no matrices lora_A.weight and lora_B.weight")
    modules: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        if len(pair) < 2 or not pair["A"].shape[0] == pair["B"].shape[1] > 0:
            shapes = ", ".join(f"lora_{half} {list(each.shape)}" for half, each in sorted(pair.items()))
            raise ConfigError(
                f"{file.path}: module {module!r:.120} has {shapes}; expected lora_A [rank, inputs] and lora_B [outputs, rank]"
            )
        scale = _scale(hf_config, module, pair["A"].shape[0])
        modules[module] = LowRank(pair["A"], pair["B"].float() * scale)
    return modules


def _scale(hf_config: Json, module: str, rank: int) -> float:
    """Return ``alpha / rank`` of a module, or ``alpha / sqrt(rank)`` (Kalajdzievski, "rsLoRA", 2023)."""
    values: dict[str, Any] = dict(hf_config)
    patterns: dict[str, Any] = values.get("alpha_pattern") or {}
    matches = (each for each in patterns if re.fullmatch(rf"(?:.*\.)?(?:{each})", module))
    first = next(matches, None)
    alpha = values.get("lora_alpha", 8) if first is None else patterns[first]
    return float(alpha) / (math.sqrt(rank) if values.get("use_rslora") else rank)


TILE_COLUMNS = 64
"""Columns that the host kernels pad a weight to."""

Handles = ctypes.Array[ctypes.c_void_p]


class LoraLayer:
    """Matrices of all adapters in one layer, by the adapters' index."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """a: ``[adapters, rank, inputs]``; b: ``[adapters, outputs, rank]``, in the model's dtype."""
        self._a, self._b = a, b

    @cached_property
    def packed(self) -> tuple[Sequence[PackedWeight], Sequence[PackedWeight]]:
        """The matrices packed for the host kernels, A of several adapters in one weight; must outlive the program.

        Frees the unpacked matrices, which only `add` reads.
        """
        count, rank, depth = self._a.shape
        together = max(1, TILE_COLUMNS // rank)
        bundles = self._a.new_zeros((-(-count // together), together * rank, depth))
        bundles.view(-1, rank, depth)[:count] = self._a
        packed = _pack(bundles), _pack(self._b)
        del self._a, self._b
        return packed

    @cached_property
    def handles(self) -> tuple[Handles, Handles]:
        """Handles of the packed matrices: of A by bundle, of B by adapter."""
        a, b = (
            (ctypes.c_void_p * len(weights))(*(each.handle for each in weights)) for weights in self.packed
        )
        return a, b

    def add(self, x: torch.Tensor, y: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        """Return ``y`` plus the adapters' product with ``x``. adapters: int64 ``[tokens]``, index plus 1, 0 without one."""
        y = y.clone()
        for number in adapters.unique().tolist():
            if number:
                tokens = (adapters == number).nonzero().squeeze(1)
                y[tokens] += x[tokens] @ self._a[number - 1].t() @ self._b[number - 1].t()
        return y


class Adapters:
    """All adapters of the served model. The layers of the model take their matrices; `check_used` follows."""

    def __init__(self, configs: Sequence[AdapterConfig], dtype: torch.dtype, device: torch.device) -> None:
        """Read the adapters' files. Raises `ConfigError`."""
        self._configs, self._dtype, self._device = configs, dtype, device
        self._modules = [read_adapter(config) for config in configs]
        self._used: set[str] = set()
        self.num_bytes = 0

    def changes(self, shape: LinearShape, prefix: str) -> bool:
        """Return True if an adapter has matrices for the layer. prefix: of names, see `WeightPlan.prefix`."""
        return not shape.is_output_layer and any(self._of_part(part.name, prefix) for part in shape.parts)

    def of_layer(self, shape: LinearShape, prefix: str) -> LoraLayer | None:
        """Return the matrices of a layer; None if it is not changed. Raises `ConfigError` if their shapes do not fit."""
        if not self.changes(shape, prefix):
            return None
        names = list(dict.fromkeys(part.name for part in shape.parts))
        found = {name: self._of_part(name, prefix) for name in names}
        ranks = [max((each.a.shape[0] for each in found[name].values()), default=0) for name in names]
        begins = dict(zip(names, [sum(ranks[:i]) for i in range(len(ranks))], strict=True))
        count, rank, depth = len(self._configs), sum(ranks), _depth_of(shape)
        a = torch.zeros((count, rank, depth), dtype=self._dtype)
        b = torch.zeros((count, shape.columns, rank), dtype=self._dtype)
        for name in names:
            for index, low in found[name].items():
                self._check(index, name, low, shape)
                a[index, begins[name] : begins[name] + low.a.shape[0]] = low.a
        row = 0
        for part in shape.parts:
            for index, low in found[part.name].items():
                begin = begins[part.name]
                b[index, row : row + part.rows, begin : begin + low.a.shape[0]] = part.bias(low.b)
            row += part.rows
        self.num_bytes += a.nbytes + b.nbytes
        return LoraLayer(a.to(self._device), b.to(self._device))

    def check_used(self, architecture: str, prefix: str, on_other_ranks: Collection[str]) -> None:
        """Raise `ConfigError` for matrices of a module that no layer has taken.

        prefix: of names, see `WeightPlan.prefix`. on_other_ranks: name prefixes of modules that other stages have
        (`WeightPlan.on_other_ranks`).
        """
        elsewhere = tuple(f"{name}." for name in on_other_ranks)
        for config, modules in zip(self._configs, self._modules, strict=True):
            unused = [
                name
                for name in sorted(set(modules) - self._used)
                if not any(each.startswith(elsewhere) for each in expected_spellings(name, prefix))
            ]
            if unused:
                more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
                raise ConfigError(
                    f"LoRA adapter {config.name!r}, {config.path}: module {unused[0]!r:.120}{more} is no linear layer of"
                    f" {architecture}, or is not supported; not supported are embeddings, output layers, experts and latent"
                    " attention's kv_b_proj: merge the adapter into the model, or drop it"
                )

    def _of_part(self, name: str, prefix: str) -> dict[int, LowRank]:
        """Return the matrices of the module by the index of their adapter."""
        found: dict[int, LowRank] = {}
        for index, modules in enumerate(self._modules):
            spelled = next((each for each in spellings(name, prefix) if each in modules), None)
            if spelled is not None:
                found[index] = modules[spelled]
                self._used.add(spelled)
        return found

    def _check(self, index: int, name: str, low: LowRank, shape: LinearShape) -> None:
        height = next(part.height for part in shape.parts if part.name == name)
        depth = _depth_of(shape)
        if low.a.shape[1] != depth or low.b.shape[0] != height:
            config = self._configs[index]
            raise ConfigError(
                f"LoRA adapter {config.name!r}, {config.path}: {name} has {low.a.shape[1]} inputs and {low.b.shape[0]} outputs;"
                f" the model has {depth} and {height}: the adapter belongs to another model"
            )


def _depth_of(shape: LinearShape) -> int:
    """Return the layer's number of inputs, over all ranks."""
    kept = shape.parts[0].kept_inputs
    return shape.depth if kept is None else kept.whole


def _pack(weights: torch.Tensor) -> Sequence[PackedWeight]:
    """Pack ``[count, columns, depth]`` into adjacent memory. Weights of adapters are small: each would take a huge page."""
    library = linear_library()
    assert library is not None, "the host kernels are not built"
    weight_format, (count, columns, depth) = WeightFormat(FLOAT_CODES[weights.dtype]), weights.shape
    size_bytes = library.weight_bytes(int(weight_format), columns, depth, 0, 0)
    stride = -(-size_bytes // ALIGNMENT) * ALIGNMENT
    memory = torch.zeros(count * stride, dtype=torch.uint8)
    packed = []
    for begin, each in zip(range(0, count * stride, stride), weights, strict=True):
        place = memory[begin : begin + size_bytes]
        packed.append(PackedWeight(library, weight_format, columns, depth, memory=place))
        packed[-1].fill(each)
    return packed
