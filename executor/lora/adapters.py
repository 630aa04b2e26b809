"""Low-rank weights of all adapters, by layer of the model.

A layer's modules are concatenated: queries, keys and values of one layer have one matrix A with the rows of all three, and one
matrix B with a block for each. All adapters have equal shapes in a layer; smaller ones are padded with zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cached_property

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.packed_weight import ALIGNMENT, PackedWeight
from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.lora.adapter_file import LowRank, read_adapter
from quintet.executor.model_config.names import expected_spellings, spellings
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import AdapterConfig

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
