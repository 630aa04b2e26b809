"""Map the tensors of a decoder's spec to those of a GGUF file.

A file's names are the same for all architectures (``blk.0.attn_q.weight``). The spec has the names and layouts of the
family's checkpoints, so one walk over it serves all families.

`add_latent` maps the tensors of latent attention (DeepSeek V2 and V3, MiniCPM 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quintet.executor.checkpoints.gguf.architectures import Architecture
from quintet.executor.checkpoints.gguf.expert_tensors import add_experts
from quintet.executor.checkpoints.gguf.header import Tensor
from quintet.executor.checkpoints.gguf.state_tensors import add_state
from quintet.executor.checkpoints.gguf.tensor_map import TensorMap
from quintet.executor.checkpoints.gguf.tensor_recipes import Recipe, TensorRows, height, scaled, unpaired
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ParallelMixerSpec,
    QkNormOver,
)


def add_latent(found: TensorMap, spec: LatentSpec) -> None:
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
    """Return the recipe of each tensor that the file has."""
    found, names = TensorMap(tensors, spec.names), spec.names
    found.module(names.embedding, "token_embd")
    found.module(names.positions, "position_embd")
    found.norm(names.embedding_norm, "token_embd_norm", spec.embedding_norm)
    final = "output_norm" if found.has("output_norm") else "token_embd_norm"  # the name in LFM2 files
    found.norm(names.final_norm, final, spec.final_norm)
    found.module(names.head, "output")
    for index, layer in enumerate(spec.layers):
        _add_layer(found.in_layer(index), layer, architecture)
    return {name: scaled(recipe, tensors) for name, recipe in found.recipes.items()}


def _add_layer(found: TensorMap, layer: LayerSpec, architecture: Architecture) -> None:
    _add_norms(found, layer)
    mixer = layer.mixer
    if isinstance(mixer, ParallelMixerSpec):
        add_state(found, mixer.state, architecture.tiled)
        mixer = mixer.attention
    if isinstance(mixer, AttentionSpec):
        _add_attention(found, mixer, architecture.interleaved_rope and not mixer.interleaved)
    elif isinstance(mixer, LatentSpec):
        add_latent(found, mixer)
    elif mixer is not None:
        add_state(found, mixer, architecture.tiled)
    if isinstance(layer.mlp, MlpSpec):
        _add_feed_forward(found, layer.mlp)
    elif layer.mlp is not None:
        add_experts(found, layer.mlp)


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
