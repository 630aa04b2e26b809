"""Quantizes a model while it reads a text: each linear layer as it first sees its inputs, all of the text's at once.

So the inputs of a layer are those that the quantized layers before it make, as they will be when it is served, and no more is
kept than one layer's Hessian. The pass is the one that serves (`quintet.executor.backends.torch.eager`), with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.batch import Rows
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.none import RowMajorLinear
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackShape
from quintet.executor.checkpoints.quantize_tool.rounders import Rounder
from quintet.executor.checkpoints.weights.load import load_checkpoint, open_files
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.card import card_of
from quintet.executor.models.model import Setting
from quintet.executor.models.registry import build_model
from quintet.executor.sequences import place, plan_of_pieces
from quintet.executor.slots import SlotTables
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

Round = Callable[[Sequence[str], torch.Tensor], Sequence[torch.Tensor]]
"""From tensors' names in the model and their inputs' products to their numbers, rounded."""
_TOKENS = 4096
"""Inputs that are multiplied at a time."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPU = torch.device("cpu")


class _Calibrating:
    """A `Quantization` whose layers quantize themselves."""

    def __init__(self, round_: Round) -> None:
        self._round = round_

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """See `Quantization.linear`."""
        if shape.is_output_layer or shape.is_exact:
            return RowMajorLinear(shape, plan)
        return _CalibratingLinear(shape, plan, self._round)

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        """See `Quantization.embedding`."""
        return None

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        """See `Quantization.pairs`."""
        return True

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """See `Quantization.stack`."""
        return RowMajorStack(shape, plan)


class _CalibratingLinear(RowMajorLinear):
    """A layer that is quantized by its first inputs, and then multiplies with what it became."""

    def __init__(self, shape: LinearShape, plan: WeightPlan, round_: Round) -> None:
        super().__init__(shape, plan)
        self._shape, self._round = shape, round_

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
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
    told: Callable[[int], object],
) -> None:
    """Have the model's linear layers rounded for these windows, in the order in which they are computed.

    told: hears of each so many numbers that were rounded. Raises `ConfigError`.
    """
    files = open_files(Path(config.path))
    there = {name: file for file in files for name in file}
    names: dict[str, str] = {}

    def round_(ours: Sequence[str], hessian: torch.Tensor) -> Sequence[torch.Tensor]:
        stored = [names[name] for name in ours]
        try:
            numbers = rounder.round(stored, [there[name].tensor(name) for name in stored], hessian)
        except ValueError as error:
            raise ConfigError(f"{config.path}: tensor {'+'.join(stored)!r:.90} {error}") from None
        told(sum(each.numel() for each in numbers))
        return numbers

    dtype = _DTYPES[config.dtype]
    model = build_model(config.architecture, card_of(config), Setting(_CPU, dtype, _Calibrating(round_)))
    names.update({ours: name for name, ours in expected_names(model.weights, files).items()})
    load_checkpoint(model.weights, files)
    model.weights.release()
    longest, num_groups = max(map(len, windows)), len(config.kv.groups)
    width = -(-longest // config.kv.block_size)
    tables = SlotTables(len(windows), longest, config.kv, _CPU)
    for slot, tokens in enumerate(windows):
        place(tables, slot, torch.tensor(tokens, dtype=torch.int32), width)
    runner = EagerRunner(model, _CPU, dtype, config.kv, len(windows) * num_groups * width)
    pieces = [(slot, 0, len(tokens)) for slot, tokens in enumerate(windows)]
    runner.forward(Rows(plan_of_pieces(pieces, draws=False)), tables)
