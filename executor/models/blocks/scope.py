"""Where a block of a layer declares its tensors, and what the checkpoint calls them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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
    """One layer's, or that of the model around the layers."""

    setting: Setting
    weights: WeightPlan
    names: Names
    hidden_size: int
    """Width of what goes from layer to layer."""
    layer: int | None = None
    """Which; None outside of layers, where names are whole."""
    transposed: bool = False
    """See `quintet.executor.model_config.spec.DecoderSpec`."""
    ropes: tuple[RopeSpec, ...] = ()
    """The model's rotations, in its order."""
    attentions: list[AttentionLayer] = field(default_factory=list)
    """Where blocks tell which attention they declared, for the model to know all of its."""

    @property
    def share(self) -> Share:
        """What this process computes of each block: of one that divides what it has into shares."""
        return self.setting.share

    def name(self, name: str) -> str:
        """Return the whole of a tensor's name."""
        return name if self.layer is None else self.names.in_layer(self.layer, name)

    def part(
        self, name: str, rows: int, total: int | None = None, begin: int = 0, groups: int = 1
    ) -> RowRange:
        """Return a part of a linear layer; see `RowRange`."""
        return RowRange(self.name(name), rows, total, begin, groups, self.transposed)

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
        return Linear(
            self.setting,
            self.weights,
            parts,
            depth,
            biased=biased,
            activation=activation,
            is_output_layer=is_output_layer,
            is_exact=is_exact,
            result_dtype=self.setting.logits_dtype if is_output_layer else None,
        )

    def norm(self, spec: NormSpec | None, name: str, width: int | None = None) -> Norm | None:
        """Declare a norm of so many numbers, of the hidden size if nothing is said; None where there is none."""
        if spec is None:
            return None
        width, name = width or self.hidden_size, self.name(name)
        return self.norm_of(spec, width, self.vector(f"{name}.weight", spec, width), name)

    def norm_of(
        self, spec: NormSpec, width: int, weight: torch.Tensor | None, name: str | None = None
    ) -> Norm:
        """Return a norm with this weight; with a bias of ``width`` where it has one, whose tensor follows ``name``."""
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
        """Declare the weight of a norm; None where it has none.

        A layer norm's offset is added here, rounded as whoever keeps the sum as a weight rounds it; an RMS norm adds its own.
        """
        if not spec.weighted:
            return None
        weight = self.weights.tensor(name, *shape, scale=0.0)
        if spec.kind is NormKind.LAYER and spec.offset:
            self.weights.expect(name, shape, lambda _: weight.add_(spec.offset), scale=0.0)
        return weight
