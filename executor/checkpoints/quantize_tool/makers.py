"""Producers of linear layers' inputs that can absorb a division: a norm's weight, or rows of another layer.

Derived from the family's spec: a norm with a single reader before a mixer or feed-forward; in gated feed-forwards the
up projection before the down projection. A shared norm result or an activation in between excludes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quintet.executor.model_config.names import Names
from quintet.executor.model_config.norm_spec import NormSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpLayout,
    MlpSpec,
    QkvLayout,
)


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
