"""Tensor names of a decoder's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate

_MODEL = "model."
_TEXT_PART = "model.language_model."
"""Prefix of a text model in the multimodal checkpoints of transformers 4.52 and later, instead of ``model.``."""
_LANGUAGE_MODEL = "language_model."
"""Prefix of all names of a text model in older multimodal checkpoints: ``language_model.lm_head``."""
_BACKBONE = "backbone."
"""Prefix in checkpoints of NemotronH. Its modules in transformers 5, and so its adapters, begin with ``model.``."""
OTHER_PARTS = ("*vision_tower.*", "*vision_model.*", "*multi_modal_projector.*", "*visual.*")
"""Patterns of the tensors of a multimodal checkpoint that do not belong to the text model."""


def spellings(name: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a checkpoint may use for an expected tensor, the expected one first.

    Either with or without the prefix, or as the text part of a multimodal model, or without its prefix. Unsloth and other tools
    write a multimodal checkpoint with the config of its text model.
    """
    found = [name]
    if prefix:
        found.append(name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
    if prefix == _MODEL:
        found.append(_LANGUAGE_MODEL + name)
    if prefix == _BACKBONE and name.startswith(prefix):
        found.append(_MODEL + name.removeprefix(prefix))
    return (*found, *_other_nesting(name))


def expected_spellings(name: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a model may expect for a checkpoint's tensor: the inverse of `spellings`."""
    found = [name, name.removeprefix(prefix), prefix + name, name.removeprefix(_LANGUAGE_MODEL)]
    if prefix == _BACKBONE and name.startswith(_MODEL):
        found.append(prefix + name.removeprefix(_MODEL))
    return (*found, *_other_nesting(name))


def _other_nesting(name: str) -> list[str]:
    """Return the name in a multimodal checkpoint of one in a text model's, and the reverse."""
    if name.startswith(_TEXT_PART):
        return [_MODEL + name.removeprefix(_TEXT_PART)]
    return [_TEXT_PART + name.removeprefix(_MODEL)] if name.startswith(_MODEL) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Tensor names without ``.weight`` or ``.bias``; the defaults are Llama's.

    Names listed after ``layer`` are relative to its name and a dot. A name is used only if the spec has the
    corresponding part.
    """

    prefix: str = "model."
    """Optional prefix: checkpoints of a model without its output layer omit it."""
    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    embedding_norm: str = "model.embed_norm"
    project_in: str = "model.project_in"
    project_out: str = "model.project_out"
    layer: str = "model.layers.{layer}"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    mixer_norm: str = "input_layernorm"
    mixer_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = "self_attn.qkv_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attended_norm: str = "self_attn.attn_sub_norm"
    sinks: str = "self_attn.sinks"
    """A full tensor name, without ``.weight`` or ``.bias``."""

    state_mixer: str = "mixer"
    """Prefix of a state mixer's tensors; the names after it are the same in all families."""
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    down_norm: str = "mlp.ffn_sub_norm"
    activation: str = "mlp.act_fn"
    """Prefix of a learned activation's parameters."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    """A full tensor name, as for stacked experts."""
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    experts_gate_up: str = "mlp.experts.gate_up_proj"
    experts_gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    experts_down: str = "mlp.experts.down_proj"
    experts_down_bias: str = "mlp.experts.down_proj_bias"
    shared_router: str = "mlp.shared_expert_gate"
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_gate_up: str = "mlp.shared_experts.gate_up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"

    ignored: tuple[str, ...] = ()
    """Patterns (``*`` as wildcard) of unused tensors that a checkpoint may contain."""

    def without_ignored(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of a checkpoint's tensors that match no pattern of `ignored`."""
        if not self.ignored:
            return list(tensors)
        pattern = re.compile("|".join(map(translate, self.ignored)))
        return [
            name
            for name in tensors
            if not any(pattern.match(each) for each in expected_spellings(name, self.prefix))
        ]

    def in_layer(self, index: int, name: str) -> str:
        """Return the full name of a tensor of layer ``index``."""
        return f"{self.layer.format(layer=index)}.{name}"
