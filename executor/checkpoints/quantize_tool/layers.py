"""Find a checkpoint's linear layers by building the model on the meta device, and the producers of their inputs.

A producer (`Maker`) can absorb a division of the inputs: a norm's weight, or rows of another layer. Producers follow from the
family's spec: a norm with a single reader before a mixer or feed-forward; in gated feed-forwards the up projection before
the down projection. A shared norm result or an activation in between excludes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackPiece, StackShape
from quintet.executor.checkpoints.weights.mapped import WeightFile
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormSpec
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpLayout,
    MlpSpec,
    QkvLayout,
)
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
        self.linears.append(shape)
        return RowMajorLinear(shape, plan)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        self.stacks.append(shape)
        return RowMajorStack(shape, plan)


def layers_of(architecture: str, hf_config: HfConfig, files: Sequence[WeightFile]) -> Layers:
    """Return the linear layers. Raises `ConfigError` for a model with layers that the format cannot hold."""
    recorded = _RecordingQuantization()
    model = build_model(architecture, hf_config, Setting(torch.device("meta"), torch.bfloat16, recorded))
    theirs = {ours: name for name, ours in expected_names(model.weights, files).items()}
    quantized: set[str] = set()
    kept: set[str] = set()
    for shape in recorded.linears:
        for part in shape.parts:
            name = theirs[part.name + _WEIGHT]
            if part.transposed and not shape.is_output_layer:
                raise ConfigError(
                    f"{hf_config.path}: {name!r:.80} is transposed in {architecture} checkpoints, which compressed-tensors"
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
        raise ConfigError(
            f"{hf_config.path}: {architecture} has no linear layer that compressed-tensors supports"
        )
    has_experts = any(not stack.is_exact for stack in recorded.stacks)
    family = FAMILIES.get(architecture)
    spec = None if family is None else family.read(hf_config)
    makers = {
        theirs[reader + _WEIGHT]: replace(maker, name=theirs[maker.name + _WEIGHT].removesuffix(_WEIGHT))
        for reader, maker in (makers_of(spec) if isinstance(spec, DecoderSpec) else {}).items()
    }
    return Layers(frozenset(whole), frozenset(kept | quantized - whole), has_experts, makers)


@dataclass(frozen=True, slots=True)
class Maker:
    """A norm or a linear layer that produces inputs."""

    name: str
    """Name of its tensors, without ``.weight`` and ``.bias``."""
    offset: float = 0.0
    """Constant that a norm adds to its weight."""
    first_row: int = 0
    """First row of a layer that produces the inputs, in order."""


def makers_of(spec: DecoderSpec) -> dict[str, Maker]:
    """Return the producers by the model's name, without ``.weight``, of the first tensor of the reading layer."""
    return {
        spec.names.in_layer(index, name): maker
        for index, layer in enumerate(spec.layers)
        for name, maker in _of_layer(spec.names, index, layer)
    }


def _of_layer(names: Names, index: int, layer: LayerSpec) -> Iterator[tuple[str, Maker]]:
    def norm(spec: NormSpec | None, name: str, reader: str) -> Iterator[tuple[str, Maker]]:
        if spec is not None and spec.weighted:
            yield reader, Maker(names.in_layer(index, name), spec.offset)

    shares_norm = layer.parallel and layer.mlp_norms.before is None
    if isinstance(layer.mixer, AttentionSpec):
        first = names.q if layer.mixer.output_gate or layer.mixer.layout is QkvLayout.SEPARATE else names.qkv
        if not (shares_norm or layer.residual_of_norm):
            yield from norm(layer.mixer_norms.before, names.mixer_norm, first)
        yield from norm(layer.mixer.attended_norm, names.attended_norm, names.output)
    mlp = layer.mlp
    if not isinstance(mlp, MlpSpec):
        return
    is_stacked = mlp.layout is MlpLayout.STACKED
    first = names.up if not mlp.gated else names.gate_up if is_stacked else names.gate
    if not (shares_norm or layer.residual_of_norm):
        yield from norm(layer.mlp_norms.before, names.mlp_norm, first)
    if mlp.down_norm is not None:
        yield from norm(mlp.down_norm, names.down_norm, names.down)
    elif mlp.gated:
        ups = names.gate_up if is_stacked else names.up
        yield names.down, Maker(names.in_layer(index, ups), first_row=mlp.width if is_stacked else 0)
