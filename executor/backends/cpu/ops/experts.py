"""Mixture of experts: torch reference of routing and of the gated feed-forwards; also the torch path of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.activation import activate, clipped
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.model_config.experts import Routing, Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Gated activation of an expert."""

    activation: GatedActivation
    factor: float = 1.0
    """Only for `GatedActivation.CLAMPED_SWIGLU`, like ``limit``."""
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """Weights of all experts, row-major, in one dtype."""

    gate_up: torch.Tensor
    """``[experts, 2 width, hidden]``: gates, then ups."""
    down: torch.Tensor
    """``[experts, hidden, width]``."""
    gate_up_bias: torch.Tensor | None
    """``[experts, 2 width]``; ``down_bias`` is ``[experts, hidden]``. Both are given or neither is."""
    down_bias: torch.Tensor | None


def route(
    scores: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, best first, int64 ``[tokens, chosen]``, and their weights in fp32.

    scores: ``[tokens, experts]``; correction: fp32 ``[experts]``, added to the scores for selection only.
    """
    values = scores.float()
    if routing.scoring is Scoring.SOFTMAX:
        values = values.softmax(-1)
    elif routing.scoring is Scoring.SIGMOID:
        values = values.sigmoid()
    choices = values if correction is None else values + correction
    if routing.groups > 1:
        grouped = choices.unflatten(-1, (routing.groups, -1))
        group_scores = grouped.topk(routing.group_best).values.sum(-1)
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool)
        is_kept.scatter_(1, _largest(group_scores, routing.chosen_groups), True)
        choices = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
    ids = _largest(choices, routing.chosen)
    weights = values.gather(1, ids)
    if routing.scoring is Scoring.SPARSE_MIXER:
        weights = _shares_of_near(values, ids, routing.jitter)
    if routing.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.addend)
    return ids, weights * routing.scale


def _shares_of_near(values: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return the weight of each choice: its softmax over the experts not chosen yet and within the jitter threshold."""
    left, shares = values.clone(), []
    for place in range(ids.shape[1]):
        chosen = ids[:, place : place + 1]
        most = values.gather(1, chosen)
        far = (most - values) / values.abs().maximum(most) > 2 * jitter
        shares.append(left.masked_fill(far, -torch.inf).softmax(1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(shares, 1)


def gated(y: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return ``activation(gate) * up`` of ``y [..., 2 width]``: ``[..., width]``."""
    gates, ups = y.chunk(2, dim=-1)
    if gate.activation is GatedActivation.CLAMPED_SWIGLU:
        gates, ups = clipped(gates, -math.inf, gate.limit), clipped(ups, -gate.limit, gate.limit)
        return gates * torch.sigmoid(gates * gate.factor) * (ups + 1)
    return activate(gates, gate.activation.kind) * ups


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tables: ExpertTables,
    gate: Gate,
    scaled_inputs: bool,
) -> torch.Tensor:
    """Return each token's weighted sum over its experts, ``[tokens, hidden]``; ids, weights: see `route`. Syncs a device."""
    y = x.new_zeros(*ids.shape, x.shape[1])  # [tokens, chosen, hidden]
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        rows = x[token]
        if scaled_inputs:
            rows = rows * weights[token, place, None].to(x.dtype)
        y[token, place] = _one(rows, tables, expert, gate)
    return sum_of_chosen(y, weights, scaled_inputs)


def _one(x: torch.Tensor, tables: ExpertTables, expert: int, gate: Gate) -> torch.Tensor:
    biases = (None, None) if tables.gate_up_bias is None else (tables.gate_up_bias, tables.down_bias)
    gate_up = F.linear(x, tables.gate_up[expert], None if biases[0] is None else biases[0][expert])
    return F.linear(
        gated(gate_up, gate), tables.down[expert], None if biases[1] is None else biases[1][expert]
    )


def sum_of_chosen(y: torch.Tensor, weights: torch.Tensor, scaled_inputs: bool) -> torch.Tensor:
    """Sum ``y [tokens, chosen, hidden]`` over the chosen experts, in order and in fp32; see `experts`."""
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for place in range(y.shape[1]):
        part = y[:, place].float()
        total = total + (part if scaled_inputs else part * weights[:, place, None])
    return total.to(y.dtype)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values of each row; ties keep their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
