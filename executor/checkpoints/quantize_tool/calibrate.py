"""Quantize a model during a forward pass over a calibration text: each linear layer on its first inputs, all tokens at
once.

So each layer sees the inputs that the quantized layers before it produce, as in serving, and memory holds one layer's
Hessian. The pass is the one of serving (`quintet.executor.backends.torch.eager`), with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackShape
from quintet.executor.checkpoints.weights.load import load_checkpoint, open_files
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.models.model import Setting, build_model
from quintet.executor.sequences import place, plan_of_parts
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

Round = Callable[[Sequence[str], torch.Tensor], Sequence[torch.Tensor]]
"""Takes the model's tensor names and their inputs' Hessian; returns the dequantized rounded weights."""
_TOKENS = 4096
"""Tokens multiplied at a time."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPU = torch.device("cpu")


class Rounder(Protocol):
    """Rounds weights and keeps the results by checkpoint weight name."""

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the rounded values of weights ``[rows, depth]`` with the same inputs. Raises ValueError.

        hessian: products of the inputs, fp32 ``[depth, depth]``.
        """


class _Calibrating(Quantization):
    """A `Quantization` with layers that quantize themselves."""

    def __init__(self, round_: Round) -> None:
        self._round = round_

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        if shape.is_output_layer or shape.is_exact:
            return RowMajorLinear(shape, plan)
        return _CalibratingLinear(shape, plan, self._round)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        return RowMajorStack(shape, plan)


class _CalibratingLinear(RowMajorLinear):
    """A layer that is quantized on its first inputs and then multiplies with the quantized weight."""

    def __init__(self, shape: LinearShape, plan: WeightPlan, round_: Round) -> None:
        super().__init__(shape, plan)
        self._shape, self._round = shape, round_

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        hessian = torch.zeros(self._shape.depth, self._shape.depth)
        for some in x.split(_TOKENS):
            inputs = some.float()
            hessian.addmm_(inputs.t(), inputs)
        names = list(dict.fromkeys(part.name for part in self._shape.parts))
        numbers = self._round([f"{name}.weight" for name in names], hessian)
        made = dict(zip(names, numbers, strict=True))
        first = 0
        for part in self._shape.parts:
            self.table[first : first + part.rows].copy_(part.weight(made[part.name]))
            first += part.rows
        return super().apply(x)


@torch.inference_mode()
def calibrated(
    config: ModelConfig,
    windows: Sequence[list[int]],
    rounder: Rounder,
    on_progress: Callable[[int], object],
) -> None:
    """Round the model's linear layers on these windows, in the order of computation.

    on_progress: called with the number of rounded values. Raises `ConfigError`.
    """
    files = open_files(Path(config.path))
    owners = {name: file for file in files for name in file}
    names: dict[str, str] = {}

    def round_(ours: Sequence[str], hessian: torch.Tensor) -> Sequence[torch.Tensor]:
        stored = [names[name] for name in ours]
        try:
            numbers = rounder.round(stored, [owners[name].tensor(name) for name in stored], hessian)
        except ValueError as error:
            raise ConfigError(f"{config.path}: tensor {'+'.join(stored)!r:.90} {error}") from None
        on_progress(sum(each.numel() for each in numbers))
        return numbers

    dtype = _DTYPES[config.dtype]
    model = build_model(config.architecture, hf_config_of(config), Setting(_CPU, dtype, _Calibrating(round_)))
    names.update({ours: name for name, ours in expected_names(model.weights, files).items()})
    load_checkpoint(model.weights, files)
    model.weights.release()
    longest, num_groups = max(map(len, windows)), len(config.kv.groups)
    width = -(-longest // config.kv.block_size)
    tables = SlotTables(len(windows), longest, config.kv, _CPU)
    for slot, tokens in enumerate(windows):
        place(tables, slot, torch.tensor(tokens, dtype=torch.int32), width)
    kv = KvMemory.reserve(config.kv, len(windows) * num_groups * width, dtype, _CPU)
    runner = EagerRunner(model, _CPU, kv)
    pieces = [(slot, 0, len(tokens)) for slot, tokens in enumerate(windows)]
    runner.forward(Rows(plan_of_parts(pieces, draws=False)), tables)
