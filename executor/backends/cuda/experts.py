"""Experts on a device: tokens in the order of the experts they chose, two products, each token's sum in the order it chose.

Nothing depends on what is chosen but numbers on the device, so that a step can be captured; nothing that is computed for a token
depends on another token.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.ops import experts as by_torch
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.activation import Gate, gated
from quintet.executor.backends.cuda.ops.linear_coded import coded_grouped_matmul, tile_for
from quintet.executor.backends.cuda.ops.linear_groups import grouped_matmul, tile_of, tiles_of_groups
from quintet.executor.checkpoints.quant.coded import CodedStack
from quintet.executor.checkpoints.quant.stack import StackMethod
from quintet.executor.models.layers.experts import Experts

GATES = {
    GatedActivation.SILU_AND_MUL: Gate.SILU,
    GatedActivation.GELU_AND_MUL: Gate.GELU,
    GatedActivation.GELU_TANH_AND_MUL: Gate.GELU_TANH,
}
"""What there are kernels for; torch computes the others."""


def experts(device: Device, layer: Experts, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return each token's sum ``[tokens, hidden]``; see `quintet.executor.models.forward.ForwardPass.experts`."""
    routing = layer.routing
    ids, weights = by_torch.route(scores, routing, layer.correction)
    num_experts, num_pairs = routing.experts, ids.numel()
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=x.device), right=True)
    multiply = _GroupedProduct(device, ends, num_pairs, x.dtype)
    rows = x.index_select(0, order // routing.chosen)
    if routing.scaled_inputs:
        rows = rows * weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    between = multiply(rows, layer.gate_up)
    gate = GATES.get(layer.gate.activation)
    wide = by_torch.gated(between, layer.gate) if gate is None else gated(device, between, gate)
    parts = multiply(wide, layer.down)
    y = torch.empty_like(parts).index_copy_(0, order, parts)
    return by_torch.sum_of_chosen(y.view(*ids.shape, -1), weights, routing.scaled_inputs)


class _GroupedProduct:
    """Rows by expert times the experts' matrices, in a number format or in codes."""

    def __init__(self, device: Device, ends: torch.Tensor, num_rows: int, dtype: torch.dtype) -> None:
        """ends: int64 ``[experts]``, behind the last row of each."""
        self._device = device
        self._ends = ends
        self._num_rows = num_rows
        self._tile = tile_of(num_rows, len(ends), dtype, device.max_shared_bytes)
        self._coded_tile = tile_for(-(-num_rows // len(ends)))
        self._tiles: dict[int, torch.Tensor] = {}
        """By the rows of a tile."""

    def __call__(self, x: torch.Tensor, method: StackMethod) -> torch.Tensor:
        if isinstance(method, CodedStack):
            tiles = self._tiles_of(self._coded_tile.rows)
            return coded_grouped_matmul(self._device, x, tiles, self._coded_tile, method.weight, method.bias)
        assert method.table is not None, "packed for the host"
        tiles = self._tiles_of(self._tile.rows)
        return grouped_matmul(self._device, x, tiles, self._tile, method.table, method.bias)

    def _tiles_of(self, height: int) -> torch.Tensor:
        if height not in self._tiles:
            self._tiles[height] = tiles_of_groups(self._ends, self._num_rows, height)
        return self._tiles[height]
