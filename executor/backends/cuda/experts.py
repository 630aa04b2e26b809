"""Mixture of experts on a device: sort the rows by expert, run two grouped GEMMs, sum per token in order of choice.

Only values on the device depend on the routing, so a step can be captured. The result of a token does not depend on other tokens.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.ops import experts as reference
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
"""Activations with kernels; torch computes the others."""


def experts(device: Device, layer: Experts, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, hidden]``; see `quintet.executor.models.forward.ForwardPass.experts`."""
    routing = layer.routing
    ids, weights = reference.route(scores, routing, layer.correction)
    num_experts, num_pairs = routing.experts, ids.numel()
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=x.device), right=True)
    multiply = _GroupedProduct(device, ends, num_pairs, x.dtype)
    rows = x.index_select(0, order // routing.chosen)
    if routing.scaled_inputs:
        rows = rows * weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    gate_up = multiply(rows, layer.gate_up)
    gate = GATES.get(layer.gate.activation)
    activated = reference.gated(gate_up, layer.gate) if gate is None else gated(device, gate_up, gate)
    parts = multiply(activated, layer.down)
    y = torch.empty_like(parts).index_copy_(0, order, parts)
    return reference.sum_of_chosen(y.view(*ids.shape, -1), weights, routing.scaled_inputs)


class _GroupedProduct:
    """Grouped GEMM: rows sorted by expert times the experts' matrices, coded or not."""

    def __init__(self, device: Device, ends: torch.Tensor, num_rows: int, dtype: torch.dtype) -> None:
        """ends: int64 ``[experts]``, end of each expert's rows."""
        self._device = device
        self._ends = ends
        self._num_rows = num_rows
        self._tile = tile_of(num_rows, len(ends), dtype, device.max_shared_bytes)
        self._coded_tile = tile_for(-(-num_rows // len(ends)))
        self._tiles: dict[int, torch.Tensor] = {}
        """By rows per tile."""

    def __call__(self, x: torch.Tensor, method: StackMethod) -> torch.Tensor:
        if isinstance(method, CodedStack):
            tiles = self._tiles_of(self._coded_tile.rows)
            return coded_grouped_matmul(self._device, x, tiles, self._coded_tile, method.weight, method.bias)
        assert method.table is not None, "the weight is packed for the CPU"
        tiles = self._tiles_of(self._tile.rows)
        return grouped_matmul(self._device, x, tiles, self._tile, method.table, method.bias)

    def _tiles_of(self, height: int) -> torch.Tensor:
        if height not in self._tiles:
            self._tiles[height] = tiles_of_groups(self._ends, self._num_rows, height)
        return self._tiles[height]
