"""Find a checkpoint's linear layers by building the model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.none import RowMajorLinear
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackPiece, StackShape
from quintet.executor.checkpoints.quantize_tool.makers import Maker, makers_of
from quintet.executor.checkpoints.weights.file import WeightFile
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec
from quintet.executor.models.model import Setting, build_model
from quintet.wire.errors import ConfigError

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Layers:
    """A checkpoint's linear layers, by weight name."""

    quantized: frozenset[str]
    kept: frozenset[str]
    """Layers that are not quantized: the output layer, routers, and other layouts."""
    has_experts: bool
    makers: Mapping[str, Maker]
    """Producers of layer inputs, by the name of the first weight that reads them; names are the checkpoint's."""


class _RecordingQuantization(Quantization):
    """A `Quantization` that only records shapes."""

    def __init__(self) -> None:
        self.linears: list[LinearShape] = []
        self.stacks: list[StackShape] = []

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """See `Quantization.linear`."""
        self.linears.append(shape)
        return RowMajorLinear(shape, plan)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """See `Quantization.stack`."""
        self.stacks.append(shape)
        return RowMajorStack(shape, plan)


def layers_of(architecture: str, card: ModelCard, files: Sequence[WeightFile]) -> Layers:
    """Return the linear layers. Raises `ConfigError` for a model with layers that the format cannot hold."""
    recorded = _RecordingQuantization()
    model = build_model(architecture, card, Setting(torch.device("meta"), torch.bfloat16, recorded))
    theirs = {ours: name for name, ours in expected_names(model.weights, files).items()}
    quantized: set[str] = set()
    kept: set[str] = set()
    for shape in recorded.linears:
        for part in shape.parts:
            name = theirs[part.name + _WEIGHT]
            if part.transposed and not shape.is_output_layer:
                raise ConfigError(
                    f"{card.path}: {name!r:.80} is transposed in {architecture} checkpoints, which compressed-tensors"
                    " does not support: write a GGUF file"
                )
            (kept if shape.is_output_layer or shape.is_exact else quantized).add(name)
    for stack in recorded.stacks:
        for piece in stack.weights:
            names = piece.names if isinstance(piece, StackPiece) else ()
            is_plain = isinstance(piece, StackPiece) and piece.is_whole and not stack.is_exact
            for ours in names:
                (quantized if is_plain else kept).add(theirs[ours])
    whole = {name for name in quantized if name.endswith(_WEIGHT)}
    if not whole:
        raise ConfigError(f"{card.path}: {architecture} has no linear layer that compressed-tensors supports")
    has_experts = any(not stack.is_exact for stack in recorded.stacks)
    family = FAMILIES.get(architecture)
    spec = None if family is None else family.read(card)
    makers = {
        theirs[reader + _WEIGHT]: replace(maker, name=theirs[maker.name + _WEIGHT].removesuffix(_WEIGHT))
        for reader, maker in (makers_of(spec) if isinstance(spec, DecoderSpec) else {}).items()
    }
    return Layers(frozenset(whole), frozenset(kept | quantized - whole), has_experts, makers)
