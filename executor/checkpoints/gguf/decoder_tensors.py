"""Map the tensors of a decoder's spec to those of a GGUF file.

A file's names are the same for all architectures (``blk.0.attn_q.weight``). The spec has the names and layouts of the
family's checkpoints, so one walk over it serves all families.

`_add_latent` maps the tensors of latent attention (DeepSeek V2 and V3, MiniCPM 3). `_add_experts` maps one three-dimensional
tensor for all gates, one for all ups, one for all downs. `_add_state` maps recurrent mixers: Mamba 1 and 2, short
convolutions, the gated delta rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.architectures import Architecture
from quintet.executor.checkpoints.gguf.header import Tensor
from quintet.executor.checkpoints.gguf.tensor_recipes import (
    Finish,
    Recipe,
    TensorMap,
    TensorRows,
    height,
    log_of_negative,
    permuted,
    scaled,
    side_by_side,
    unpaired,
)
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.mtp import MtpNames, MtpSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ParallelMixerSpec,
    QkNormOver,
    StateSpec,
)
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec


def _add_latent(found: TensorMap, spec: LatentSpec) -> None:
    """Add the recipes of one layer. Older files have one KV up-projection; newer ones split it into keys and values."""
    names = found.names
    if spec.q_rank is None:
        found.module(names.q, "attn_q")
    else:
        found.module(names.q_a, "attn_q_a")
        found.norm(names.q_a_norm, "attn_q_a_norm", spec.norm)
        found.module(names.q_b, "attn_q_b")
    found.module(names.kv_a, "attn_kv_a_mqa")
    found.norm(names.kv_a_norm, "attn_kv_a_norm", spec.norm)
    found.module(names.output, "attn_output")
    found.module(names.kv_b, "attn_kv_b")
    keys, values = found.rows("attn_k_b.weight"), found.rows("attn_v_b.weight")
    if keys is None or values is None:
        return
    heads, plain, wide, rank = spec.num_heads, spec.plain_dim, spec.head_width, spec.rank

    def by_head(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        of_keys = parts[0].reshape(heads, rank, plain).transpose(1, 2)
        return torch.cat([of_keys, parts[1].reshape(heads, wide, rank)], 1)

    found.add(f"{names.kv_b}.weight", (keys, values), (heads * (plain + wide), rank), by_head)


def recipes_of(
    spec: DecoderSpec, tensors: Mapping[str, Tensor], architecture: Architecture
) -> dict[str, Recipe]:
    """Return the recipe of each tensor that the file has. spec: of a model, or of its multi-token prediction layers."""
    found, names = TensorMap(tensors, spec.names), spec.names
    if isinstance(spec, MtpSpec):
        (first,) = spec.aux_layers
        for number, (parts, layer) in enumerate(zip(spec.parts, spec.layers, strict=True), first):
            _add_predictor(found, parts, spec.final_norm, number)
            inside = replace(found, names=replace(names, layer=parts.layer), layer=number)
            _add_layer(inside, layer, architecture)
        return {name: scaled(recipe, tensors) for name, recipe in found.recipes.items()}
    found.module(names.embedding, "token_embd")
    found.module(names.positions, "position_embd")
    found.norm(names.embedding_norm, "token_embd_norm", spec.embedding_norm)
    final = "output_norm" if found.has("output_norm") else "token_embd_norm"  # the name in LFM2 files
    found.norm(names.final_norm, final, spec.final_norm)
    found.module(names.head, "output")
    for index, layer in enumerate(spec.layers):
        _add_layer(found.in_layer(index), layer, architecture)
    return {name: scaled(recipe, tensors) for name, recipe in found.recipes.items()}


def _add_predictor(found: TensorMap, parts: MtpNames, norm: NormSpec | None, number: int) -> None:
    """Add the recipes around a multi-token prediction layer, which is layer ``number`` of the file."""
    nextn = f"blk.{number}.nextn"
    last = f"blk.{number}.layer_output_norm"  # in files of Ling 2
    theirs = f"{nextn}.enorm", f"{nextn}.hnorm", last if found.has(last) else f"{nextn}.shared_head_norm"
    for ours, each in zip((parts.token_norm, parts.hidden_norm, parts.output_norm), theirs, strict=True):
        if ours is not None:
            found.norm(ours, each, norm)
    found.module(parts.projection, f"{nextn}.eh_proj")


def _add_layer(found: TensorMap, layer: LayerSpec, architecture: Architecture) -> None:
    _add_norms(found, layer)
    mixer = layer.mixer
    if isinstance(mixer, ParallelMixerSpec):
        _add_state(found.within(found.names.state_mixer), mixer.state, architecture.tiled)
        mixer = mixer.attention
    if isinstance(mixer, AttentionSpec):
        _add_attention(found, mixer, architecture.interleaved_rope and not mixer.interleaved)
    elif isinstance(mixer, LatentSpec):
        _add_latent(found, mixer)
    elif mixer is not None:
        _add_state(found.within(found.names.state_mixer), mixer, architecture.tiled)
    if isinstance(layer.mlp, MlpSpec):
        _add_feed_forward(found, layer.mlp)
    elif layer.mlp is not None:
        _add_experts(found, layer.mlp)


def _add_norms(found: TensorMap, layer: LayerSpec) -> None:
    names, mixer, mlp = found.names, layer.mixer_norms, layer.mlp_norms
    both = found.has("attn_norm_2")  # Falcon 40B: two norms of one input, the second for attention
    found.norm(names.mixer_norm, "attn_norm_2" if both else "attn_norm", mixer.before)
    found.norm(names.mixer_out_norm, "post_attention_norm", mixer.after)
    before = "attn_norm" if both else "ffn_norm"
    if layer.mixer is None and found.has("attn_norm"):
        before = "attn_norm"  # norm of any layer kind
    elif mixer.after is None and not found.has(before):
        before = "post_attention_norm"
    found.norm(names.mlp_norm, before, mlp.before)
    found.norm(names.mlp_out_norm, "post_ffw_norm", mlp.after)


def _add_attention(found: TensorMap, spec: AttentionSpec, paired: bool) -> None:
    names = found.names
    for leaf in ("weight", "bias"):
        rows = _qkv(found, spec, paired, leaf)
        if rows is not None:
            for name, part in zip((names.q, names.k, names.v), rows, strict=True):
                found.stacked(f"{name}.{leaf}", (part,))
    found.module(names.output, "attn_output")
    found.norm(names.attended_norm, "attn_sub_norm", spec.attended_norm)
    found.whole(found.names.sinks, "attn_sinks.weight")
    norm = spec.qk_norm
    for ours, theirs in ((found.names.q_norm, "attn_q_norm"), (found.names.k_norm, "attn_k_norm")):
        if norm is not None and spec.qk_norm_over is QkNormOver.OWN and "{head}" in ours:
            _add_norm_of_heads(found, ours, theirs, spec.head_dim)
        else:
            found.norm(ours, theirs, norm)


def _qkv(
    found: TensorMap, spec: AttentionSpec, paired: bool, leaf: str
) -> tuple[TensorRows, TensorRows, TensorRows] | None:
    """Return the rows of queries, keys and values in the order of a model that rotates halves; None if the file has
    none."""
    heads, kv_heads, dim = spec.num_heads * (2 if spec.output_gate else 1), spec.num_kv_heads, spec.head_dim
    stacked = found.rows(f"attn_qkv.{leaf}")
    if stacked is not None:
        first, second = heads * dim, (heads + kv_heads) * dim
        q, k = stacked.between(0, first), stacked.between(first, second)
        v = stacked.between(second, second + kv_heads * spec.value_dim)
    else:
        separate = [found.rows(f"attn_{part}.{leaf}") for part in "qkv"]
        if separate[0] is None or separate[1] is None or separate[2] is None:
            return None
        q, k, v = separate[0], separate[1], separate[2]
    if paired:
        q, k = q.reordered(unpaired(heads, dim)), k.reordered(unpaired(kv_heads, dim))
    return q, k, v


def _add_norm_of_heads(found: TensorMap, ours: str, theirs: str, dim: int) -> None:
    """Add a norm tensor for each head; the file has one row for each head."""
    tensor, rows = found.tensor(f"{theirs}.weight"), found.rows(f"{theirs}.weight")
    if tensor is None or rows is None:
        return
    for head in range(height(tensor.shape)):
        found.add(f"{ours.format(head=head)}.weight", (rows.between(head, head + 1),), (dim,))


def _add_feed_forward(found: TensorMap, spec: MlpSpec) -> None:
    names, both = found.names, found.rows("ffn_up.weight")
    if spec.gated and not found.has("ffn_gate") and both is not None:  # fused gate and up: Phi 3, ChatGLM
        found.stacked(f"{names.gate}.weight", (both.between(0, spec.width),))
        found.stacked(f"{names.up}.weight", (both.between(spec.width, 2 * spec.width),))
    else:
        found.module(names.up, "ffn_up")
        if spec.gated:
            found.module(names.gate, "ffn_gate")
    found.module(names.down, "ffn_down")
    found.norm(names.down_norm, "ffn_sub_norm", spec.down_norm)


def _add_experts(found: TensorMap, spec: ExpertsSpec) -> None:
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


def _add_state(found: TensorMap, spec: StateSpec, tiled: bool) -> None:
    """Add the recipes of one layer's mixer, to a map within it; ``tiled``: see `Architecture`."""
    match spec:
        case DeltaSpec():
            _add_delta(found, spec, tiled)
        case MambaSpec():
            _add_mamba(found, spec)
        case Mamba2Spec():
            _add_mamba2(found, spec)
        case ShortConvSpec():
            _add_convolution(found, "conv", "shortconv.conv", spec.channels, spec.taps)
            found.module("in_proj", "shortconv.in_proj")
            found.module("out_proj", "shortconv.out_proj")


def _add_mamba(found: TensorMap, spec: MambaSpec) -> None:
    found.module("in_proj", "ssm_in")
    found.module("x_proj", "ssm_x")
    found.module("dt_proj", "ssm_dt")
    found.module("out_proj", "ssm_out")
    _add_convolution(found, "conv1d", "ssm_conv1d", spec.channels, spec.taps)
    found.whole("A_log", "ssm_a", log_of_negative)
    found.whole("D", "ssm_d")
    for part in ("dt", "b", "c"):
        found.norm(f"{part}_layernorm", f"ssm_{part}_norm", spec.inner_norm)


def _add_mamba2(found: TensorMap, spec: Mamba2Spec) -> None:
    found.module("in_proj", "ssm_in")
    found.module("out_proj", "ssm_out")
    _add_convolution(found, "conv1d", "ssm_conv1d", spec.conv_channels, spec.taps)
    found.whole("dt_bias", "ssm_dt.bias")
    found.whole("A_log", "ssm_a", log_of_negative, (spec.num_heads,))
    found.whole("D", "ssm_d", shape=(spec.num_heads,))
    if spec.norm is not None:
        found.whole("norm.weight", "ssm_norm.weight", shape=(spec.channels,))


def _add_delta(found: TensorMap, spec: DeltaSpec, tiled: bool) -> None:
    """Add a gated delta rule. Older Qwen3-Next files group queries, keys, values and gates by key head, like
    checkpoints."""
    keys, values, heads = spec.keys, spec.channels, spec.num_heads
    both, qkv, gates = (found.rows(f"{name}.weight") for name in ("ssm_in", "attn_qkv", "attn_gate"))
    wide, narrow = _grouped(spec, spec.head_dim, tiled), _grouped(spec, 1, tiled)
    if qkv is not None and gates is not None:
        of_values = qkv.between(2 * keys, 2 * keys + values).reordered(wide)
        found.stacked("in_proj_qkv.weight", (qkv.between(0, 2 * keys), of_values))
        found.stacked("in_proj_z.weight", (gates.reordered(wide),))
    elif both is not None:
        sizes = (spec.key_dim, spec.key_dim, values // spec.key_heads, values // spec.key_heads)
        q, k, v, z = _by_kind(both, spec.key_heads, sizes)
        found.stacked("in_proj_qkv.weight", (q, k, v))
        found.stacked("in_proj_z.weight", (z,))
    pairs = found.rows("ssm_ba.weight")
    if pairs is not None:
        each = heads // spec.key_heads
        betas, alphas = _by_kind(pairs, spec.key_heads, (each, each))
        found.stacked("in_proj_b.weight", (betas,))
        found.stacked("in_proj_a.weight", (alphas,))
    found.whole("in_proj_b.weight", "ssm_beta.weight", order=narrow)
    found.whole("in_proj_a.weight", "ssm_alpha.weight", order=narrow)
    channels = None if wide is None else np.concatenate([np.arange(2 * keys), 2 * keys + wide])
    _add_convolution(found, "conv1d", "ssm_conv1d", 2 * keys + values, spec.taps, channels)
    found.whole("dt_bias", "ssm_dt.bias", order=narrow)
    found.whole("A_log", "ssm_a", log_of_negative, (heads,), narrow)
    found.norm("norm", "ssm_norm", spec.norm)
    moved: Finish | None = None if wide is None else permuted(wide)
    found.whole("out_proj.weight", "ssm_out.weight", moved)


def _grouped(spec: DeltaSpec, width: int, tiled: bool) -> NDArray[np.int64] | None:
    """Return the rows of value heads grouped by key head; None: no reordering."""
    if not tiled or spec.num_heads == spec.key_heads:
        return None
    order = np.arange(spec.num_heads * width)
    return order.reshape(-1, spec.key_heads, width).swapaxes(0, 1).reshape(-1)


def _by_kind(rows: TensorRows, groups: int, sizes: tuple[int, ...]) -> list[TensorRows]:
    """Return the rows of each kind from groups that contain all kinds."""
    inside = np.arange(groups * sum(sizes)).reshape(groups, -1)
    ends = np.cumsum(sizes)
    return [rows.reordered(part.reshape(-1)) for part in np.split(inside, ends[:-1], axis=1)]


def _add_convolution(
    found: TensorMap, ours: str, theirs: str, channels: int, taps: int, order: NDArray[np.int64] | None = None
) -> None:
    found.whole(f"{ours}.weight", f"{theirs}.weight", shape=(channels, 1, taps), order=order)
    found.whole(f"{ours}.bias", f"{theirs}.bias")
