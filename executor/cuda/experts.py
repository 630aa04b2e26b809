"""Experts on a device: tokens in the order of the experts they chose, two products, each token's sum in the order it chose.

Nothing depends on what is chosen but numbers on the device, so that a step can be captured; nothing that is computed for a token
depends on another token.
"""

from __future__ import annotations

import torch

from quintet.executor.cuda.device import Device
from quintet.executor.cuda.ops.activation import Gate, gated
from quintet.executor.cuda.ops.linear_groups import grouped_matmul, tile_of, tiles_of_groups
from quintet.executor.layers.experts import Experts
from quintet.executor.ops import experts as by_torch
from quintet.executor.ops.linear import GatedActivation

GATES = {
    GatedActivation.SILU_AND_MUL: Gate.SILU,
    GatedActivation.GELU_AND_MUL: Gate.GELU,
    GatedActivation.GELU_TANH_AND_MUL: Gate.GELU_TANH,
}
"""What there are kernels for; torch computes the others."""


def experts(device: Device, layer: Experts, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return each token's sum ``[tokens, hidden]``; see `quintet.executor.models.forward.ForwardPass.experts`."""
    tables, routing = layer.tables, layer.routing
    ids, weights = by_torch.route(scores, routing, layer.correction)
    num_experts, num_pairs = len(tables.gate_up), ids.numel()
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=x.device), right=True)
    tile = tile_of(num_pairs, num_experts, x.dtype, device.max_shared_bytes)
    tiles = tiles_of_groups(ends, num_pairs, tile.rows)
    rows = x.index_select(0, order // routing.chosen)
    if routing.scaled_inputs:
        rows = rows * weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    between = grouped_matmul(device, rows, tiles, tile, tables.gate_up, tables.gate_up_bias)
    gate = GATES.get(layer.gate.activation)
    wide = by_torch.gated(between, layer.gate) if gate is None else gated(device, between, gate)
    parts = grouped_matmul(device, wide, tiles, tile, tables.down, tables.down_bias)
    y = torch.empty_like(parts).index_copy_(0, order, parts)
    return by_torch.sum_of_chosen(y.view(*ids.shape, -1), weights, routing.scaled_inputs)
