"""Permutation of a layer's inputs before its packed weight: inputs of one group become adjacent."""

from __future__ import annotations

from functools import partial

import torch

from quintet.executor.checkpoints.quant.source import CodedRows, RowSource
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError


def declare_order(sources: list[RowSource], depth: int, plan: WeightPlan) -> torch.Tensor | None:
    """Return the order, int32 ``[depth]``, filled by a loader; None if the groups are contiguous.

    The loader fills it also for a mapped packed weight. All sources must have one order, since they share one x.
    """
    ordered = [source for source in sources if isinstance(source, CodedRows) and is_ordered(source)]
    if not ordered:
        return None
    order = torch.full((depth,), -1, dtype=torch.int32, device=plan.device)
    for source in ordered:
        name, group = f"{source.part.name}.{source.scheme.order}", source.scheme.group or depth
        plan.expect(name, (depth,), partial(_fill, order, group, source.part.name), num_bytes=order.nbytes)
    return order


def is_ordered(source: RowSource) -> bool:
    """Return True if the groups of a source's scales are not contiguous inputs."""
    return isinstance(source, CodedRows) and source.scheme.order is not None


def sorted_inputs(groups: torch.Tensor) -> torch.Tensor:
    """Return the inputs sorted by group (stable): int64 ``[depth]``."""
    return torch.argsort(groups, stable=True)


def _fill(order: torch.Tensor, group: int, layer: str, groups: torch.Tensor) -> None:
    its = sorted_inputs(groups).to(order.device)
    groups = groups.to(order.device)
    if not torch.equal(groups[its].long(), torch.arange(len(groups), device=order.device) // group):
        raise ConfigError(f"layer {layer!r}: g_idx must have {group} inputs in each group")
    if int(order[0]) < 0:
        order.copy_(its)
    elif not torch.equal(order, its.int()):
        raise ConfigError(
            f"layer {layer!r}: its order of inputs differs from that of the layer fused with it: quantize the"
            " model again with desc_act false, or static_groups"
        )
