"""Where a GGUF file has what experts expect: a matrix of three dimensions for all gates, one for all ups, one for all downs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.cards.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.gguf.found import Found
from quintet.executor.gguf.recipes import Finish, Rows


def add_experts(found: Found, spec: ExpertsSpec) -> None:
    """Say how the tensors of one layer are made."""
    names, count = found.names, spec.routing.experts
    found.module(names.router, "ffn_gate_inp")
    row = (1, count) if spec.correction_in_row else (count,)
    found.whole(names.correction, "exp_probs_b.bias", shape=row)
    _add_gates_and_ups(found, spec)
    _add_downs(found, spec)
    _add_shared(found, spec)


def _add_gates_and_ups(found: Found, spec: ExpertsSpec) -> None:
    names, count, wide = found.names, spec.routing.experts, spec.width
    rows = _gates_and_ups(found, count, wide)
    if rows is None:
        return
    gates, ups = rows
    if spec.layout is ExpertsLayout.SEPARATE:
        for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
            found.stacked(f"{names.expert_gate.format(expert=expert)}.weight", (gate,))
            found.stacked(f"{names.expert_up.format(expert=expert)}.weight", (up,))
        return
    depth = found.tensors[gates[0].name].shape[-1]
    both = tuple(part for pair in zip(gates, ups, strict=True) for part in pair)
    if spec.layout is ExpertsLayout.STACKED:
        found.add(names.experts_gate_up, both, (count, 2 * wide, depth))
    else:
        alternate = spec.layout is ExpertsLayout.ALTERNATING
        found.add(names.experts_gate_up, both, (count, depth, 2 * wide), _columns(count, 2, wide, alternate))
    gate_bias, up_bias = found.rows("ffn_gate_exps.bias"), found.rows("ffn_up_exps.bias")
    if gate_bias is not None and up_bias is not None:
        biases = _side_by_side(spec.layout is ExpertsLayout.ALTERNATING)
        found.add(names.experts_gate_up_bias, (gate_bias, up_bias), (count, 2 * wide), biases)


def _gates_and_ups(found: Found, count: int, wide: int) -> tuple[list[Rows], list[Rows]] | None:
    """Return the rows of each expert's gates and ups: of a tensor for both, of one for each, or, in old files, of one each."""
    both = found.rows("ffn_gate_up_exps.weight")
    if both is not None:
        pairs = [both.between(2 * wide * expert, 2 * wide * (expert + 1)) for expert in range(count)]
        return [pair.between(0, wide) for pair in pairs], [pair.between(wide, 2 * wide) for pair in pairs]
    gates, ups = (_by_expert(found, which, count, wide) for which in ("gate", "up"))
    return None if gates is None or ups is None else (gates, ups)


def _by_expert(found: Found, which: str, count: int, height: int) -> list[Rows] | None:
    whole = found.rows(f"ffn_{which}_exps.weight")
    if whole is not None:
        return [whole.between(height * expert, height * (expert + 1)) for expert in range(count)]
    apart = [found.rows(f"ffn_{which}.{expert}.weight") for expert in range(count)]
    there = [rows for rows in apart if rows is not None]
    return there if len(there) == count else None


def _add_downs(found: Found, spec: ExpertsSpec) -> None:
    names, count, wide = found.names, spec.routing.experts, spec.width
    tensor = found.tensor("ffn_down_exps.weight") or found.tensor("ffn_down.0.weight")
    if tensor is None:
        return
    hidden = tensor.shape[-2]
    downs = _by_expert(found, "down", count, hidden)
    if downs is None:
        return
    if spec.layout is ExpertsLayout.SEPARATE:
        for expert, rows in enumerate(downs):
            found.stacked(f"{names.expert_down.format(expert=expert)}.weight", (rows,))
    elif spec.layout is ExpertsLayout.STACKED:
        found.add(names.experts_down, tuple(downs), (count, hidden, wide))
    else:
        found.add(names.experts_down, tuple(downs), (count, wide, hidden), _columns(count, 1, hidden, False))
    found.whole(names.experts_down_bias, "ffn_down_exps.bias")


def _add_shared(found: Found, spec: ExpertsSpec) -> None:
    names, gate, up = found.names, found.rows("ffn_gate_shexp.weight"), found.rows("ffn_up_shexp.weight")
    if spec.shared_stacked and gate is not None and up is not None:
        found.stacked(f"{names.shared_gate_up}.weight", (gate, up))
    elif not spec.shared_stacked:
        found.module(names.shared_gate, "ffn_gate_shexp")
        found.module(names.shared_up, "ffn_up_shexp")
    found.module(names.shared_down, "ffn_down_shexp")
    router = found.tensor("ffn_gate_inp_shexp.weight")
    if router is not None:
        found.whole(f"{names.shared_router}.weight", "ffn_gate_inp_shexp.weight", shape=(1, router.shape[-1]))


def _columns(count: int, kinds: int, height: int, alternate: bool) -> Finish:
    """Return what makes ``[experts, depth, rows]`` of rows; ``alternate``: rows of the kinds take turns."""

    def finish(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat(list(parts)).view(count, kinds, height, -1)
        rows = rows.transpose(1, 2) if alternate else rows
        return rows.reshape(count, kinds * height, -1).transpose(1, 2)

    return finish


def _side_by_side(alternate: bool) -> Finish:
    """Return what makes ``[experts, 2 width]`` of the biases of gates and those of ups."""

    def finish(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts), 2 if alternate else 1).flatten(1)

    return finish
