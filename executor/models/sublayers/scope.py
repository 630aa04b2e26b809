"""Context in which a sublayer declares its tensors: settings, weights, names and share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import RopeSpec
from quintet.executor.model_config.share import Share
from quintet.executor.model_config.spec import NormKind, NormSpec
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import GatedActivation, Linear, RowRange
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.model import Setting


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope of one layer, or of the model outside its layers."""

    setting: Setting
    weights: WeightPlan
    names: Names
    hidden_size: int
    """Width of the residual stream."""
    transposed: bool = False
    """See `quintet.executor.model_config.spec.DecoderSpec`."""
    ropes: tuple[RopeSpec, ...] = ()
    """The model's rotations, in order."""
    attentions: list[AttentionLayer] = field(default_factory=list)
    """The model's attention layers, appended by sublayers."""
    layer: int | None = None
    """Layer index; None outside of layers, where names are complete."""

    @property
    def share(self) -> Share:
        """The share of the model that this process computes."""
        return self.setting.share

    def of_layer(self, index: int) -> Scope:
        """Return the scope of one of the model's layers."""
        return replace(self, layer=index)

    def name(self, name: str) -> str:
        """Return the full name of a tensor."""
        return name if self.layer is None else self.names.in_layer(self.layer, name)

    def part(
        self, name: str, rows: int, total: int | None = None, begin: int = 0, groups: int = 1
    ) -> RowRange:
        """Return a part of a linear layer; see `RowRange`."""
        transposed = self.transposed and self.layer is not None
        return RowRange(self.name(name), rows, total, begin, groups, transposed)

    def linear(
        self,
        parts: Sequence[RowRange],
        depth: int,
        *,
        biased: bool = False,
        activation: GatedActivation = GatedActivation.NONE,
        is_output_layer: bool = False,
        is_exact: bool = False,
    ) -> Linear:
        """Declare a linear layer."""
        result_dtype = self.setting.logits_dtype if is_output_layer else None
        shape = LinearShape(tuple(parts), depth, biased, activation, is_output_layer, is_exact, result_dtype)
        linear = Linear(self.setting.quantization, self.weights, shape)
        if self.setting.adapters is not None:
            linear.lora = self.setting.adapters.of_layer(shape, self.weights.prefix)
        return linear

    def pairs(self, shape: LinearShape) -> bool:
        """Return True if one layer can hold gate and up projections, with their activation: no adapter changes them."""
        adapters, prefix = self.setting.adapters, self.weights.prefix
        is_changed = adapters is not None and adapters.changes(shape, prefix)
        return not is_changed and self.setting.quantization.pairs(shape, self.weights)

    def norm(self, spec: NormSpec | None, name: str, width: int | None = None) -> Norm | None:
        """Declare a norm of ``width`` elements, by default the hidden size; None without a spec."""
        if spec is None:
            return None
        width, name = width or self.hidden_size, self.name(name)
        return self.norm_of(spec, width, self.vector(f"{name}.weight", spec, width), name)

    def norm_of(
        self, spec: NormSpec, width: int, weight: torch.Tensor | None, name: str | None = None
    ) -> Norm:
        """Return a norm with this weight, and a bias ``{name}.bias`` of ``width`` elements if the spec has one."""
        bias = self.weights.tensor(f"{name}.bias", width) if spec.biased else None
        offset = spec.offset if spec.kind is NormKind.RMS else 0.0
        return Norm(
            kind=spec.kind,
            width=width,
            eps=spec.eps,
            weight=weight,
            bias=bias,
            offset=offset,
            rounds_once=spec.rounds_once,
        )

    def vector(self, name: str, spec: NormSpec, *shape: int) -> torch.Tensor | None:
        """Declare the weight of a norm; None if it has none.

        A layer norm's offset is added to the loaded weight, rounded to its dtype. An RMS norm adds its offset when it
        runs.
        """
        if not spec.weighted:
            return None
        weight = self.weights.tensor(name, *shape, scale=0.0)
        if spec.kind is NormKind.LAYER and spec.offset:
            self.weights.expect(name, shape, lambda _: weight.add_(spec.offset), scale=0.0)
        return weight
