"""Map expert tensors of a GGUF file: one three-dimensional tensor for all gates, one for all ups, one for all downs."""

from __future__ import annotations

from quintet.executor.checkpoints.gguf.tensor_map import TensorMap
from quintet.executor.checkpoints.gguf.tensor_recipes import TensorRows, side_by_side
from quintet.executor.model_config.experts import ExpertsSpec


def add_experts(found: TensorMap, spec: ExpertsSpec) -> None:
    """Add the recipes of one layer's experts."""
    names, count = found.names, spec.routing.experts
    found.module(names.router, "ffn_gate_inp")
    row = (1, count) if spec.correction_in_row else (count,)
    found.whole(names.correction, "exp_probs_b.bias", shape=row)
    _add_gates_and_ups(found, spec)
    _add_downs(found, spec)
    _add_shared(found)


def _add_gates_and_ups(found: TensorMap, spec: ExpertsSpec) -> None:
    names, count, wide = found.names, spec.routing.experts, spec.width
    rows = _gates_and_ups(found, count, wide)
    if rows is None:
        return
    for expert, (gate, up) in enumerate(zip(*rows, strict=True)):
        found.stacked(f"{names.expert_gate.format(expert=expert)}.weight", (gate,))
        found.stacked(f"{names.expert_up.format(expert=expert)}.weight", (up,))
    gate_bias, up_bias = found.rows("ffn_gate_exps.bias"), found.rows("ffn_up_exps.bias")
    if gate_bias is not None and up_bias is not None:
        found.add(names.experts_gate_up_bias, (gate_bias, up_bias), (count, 2 * wide), side_by_side)


def _gates_and_ups(
    found: TensorMap, count: int, wide: int
) -> tuple[list[TensorRows], list[TensorRows]] | None:
    """Return the gate and up rows of each expert. Files have a fused tensor, one for each kind, or (old) one for each
    expert."""
    both = found.rows("ffn_gate_up_exps.weight")
    if both is not None:
        pairs = [both.between(2 * wide * expert, 2 * wide * (expert + 1)) for expert in range(count)]
        return [pair.between(0, wide) for pair in pairs], [pair.between(wide, 2 * wide) for pair in pairs]
    gates, ups = (_by_expert(found, which, count, wide) for which in ("gate", "up"))
    return None if gates is None or ups is None else (gates, ups)


def _by_expert(found: TensorMap, which: str, count: int, height: int) -> list[TensorRows] | None:
    whole = found.rows(f"ffn_{which}_exps.weight")
    if whole is not None:
        return [whole.between(height * expert, height * (expert + 1)) for expert in range(count)]
    separate = [found.rows(f"ffn_{which}.{expert}.weight") for expert in range(count)]
    present = [rows for rows in separate if rows is not None]
    return present if len(present) == count else None


def _add_downs(found: TensorMap, spec: ExpertsSpec) -> None:
    names, count = found.names, spec.routing.experts
    tensor = found.tensor("ffn_down_exps.weight") or found.tensor("ffn_down.0.weight")
    downs = None if tensor is None else _by_expert(found, "down", count, tensor.shape[-2])
    for expert, rows in enumerate(downs or ()):
        found.stacked(f"{names.expert_down.format(expert=expert)}.weight", (rows,))
    found.whole(names.experts_down_bias, "ffn_down_exps.bias")


def _add_shared(found: TensorMap) -> None:
    names = found.names
    found.module(names.shared_gate, "ffn_gate_shexp")
    found.module(names.shared_up, "ffn_up_shexp")
    found.module(names.shared_down, "ffn_down_shexp")
    router = found.tensor("ffn_gate_inp_shexp.weight")
    if router is not None:
        found.whole(f"{names.shared_router}.weight", "ffn_gate_inp_shexp.weight", shape=(1, router.shape[-1]))
