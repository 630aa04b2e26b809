"""Models of attention and Mamba layers: Jamba, Bamba, Falcon-H1 and Granite 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import MAX_EXPERTS, ExpertsLayout, ExpertsSpec, Scoring
from quintet.executor.model_config.families.mamba import (
    check_silu,
    dt_rank,
    expanded,
    groups,
    heads,
    state_size,
    taps,
)
from quintet.executor.model_config.families.moe import EXPERTS, expert_width, routing
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    MAX_LAYERS,
    MAX_WIDTH,
    attention,
    decoder,
    factor,
    gated,
    layer_types,
    max_positions,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.model_config.spec import (
    Activation,
    DecoderSpec,
    FeedForwardSpec,
    MlpLayout,
    MlpSpec,
    NormSpec,
    ParallelMixerSpec,
)
from quintet.executor.model_config.state_specs import Mamba2Spec, MambaSpec

_MOST = 1e6
"""Limit of a factor."""

NAMES = Names(
    state_mixer="mamba",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    expert_gate="feed_forward.experts.{expert}.gate_proj",
    expert_up="feed_forward.experts.{expert}.up_proj",
    expert_down="feed_forward.experts.{expert}.down_proj",
)


def jamba(card: ModelCard) -> DecoderSpec:
    """Jamba: attention without positions in every eighth layer; Mamba 1 with inner norms in the others."""
    norm = rms(card)
    check_silu(card)
    mamba = MambaSpec(
        channels=expanded(card, "mamba_expand"),
        state_size=state_size(card, "mamba_d_state", 16),
        dt_rank=dt_rank(card, "mamba_dt_rank"),
        taps=taps(card, "mamba_d_conv"),
        conv_bias=card.flag("mamba_conv_bias", True),
        projection_bias=card.flag("mamba_proj_bias", False),
        inner_norm=norm,
    )
    attention_spec = attention(card, kv_heads=8, rotated=False)
    is_attention, is_routed = _every(card, "attn_layer", 8, 4), _every(card, "expert_layer", 2, 1)
    plain, routed = gated(card), _jamba_experts(card)
    layers = [
        pre_norm(
            norm, attention_spec if is_attention(layer) else mamba, routed if is_routed(layer) else plain
        )
        for layer in range(num_layers(card))
    ]
    names = replace(NAMES, final_norm="model.final_layernorm", router="feed_forward.router")
    return decoder(card, layers, norm, names=names, reach=max_positions(card, 262144))


def _every(card: ModelCard, key: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a predicate for the layers of a period and offset; ``period`` and ``offset`` are the family's defaults."""
    period = card.whole(f"{key}_period", 1, MAX_LAYERS, period)
    offset = card.whole(f"{key}_offset", 0, period - 1, min(offset, period - 1))
    return lambda layer: layer % period == offset


def _jamba_experts(card: ModelCard) -> FeedForwardSpec:
    """Return Jamba's experts; a plain feed-forward if there is only one."""
    if card.whole(EXPERTS, 1, MAX_EXPERTS, 16) == 1:
        return gated(card)
    return ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX, 16, 2), width=expert_width(card, "intermediate_size")
    )


def _mamba2(card: ModelCard, norm: NormSpec | None, channels: int, default_groups: int = 1) -> Mamba2Spec:
    """Return Mamba 2 from the keys of hybrid models."""
    check_silu(card)
    count = card.whole("mamba_n_heads", 1, MAX_WIDTH, 128)
    biased = card.flag("mamba_proj_bias", False)
    return Mamba2Spec(
        **heads(card, norm, count, "mamba_d_head", channels),
        groups=groups(card, "mamba_n_groups", default_groups, count),
        state_size=state_size(card, "mamba_d_state", 256),
        taps=taps(card, "mamba_d_conv"),
        conv_bias=card.flag("mamba_conv_bias", True),
        projection_bias=biased,
        output_bias=biased,
    )


def bamba(card: ModelCard) -> DecoderSpec:
    """Bamba: Mamba 2, and attention in the listed layers with half of each head rotated."""
    norm = rms(card, 1e-5)
    mamba = _mamba2(card, norm, expanded(card, "mamba_expand"))
    biased = card.flag("attention_bias", False)
    attention_spec = pre_norm(
        norm,
        attention(
            card,
            kv_heads=8,
            positions=262144,
            share=0.5,
            qkv_bias=biased,
            output_bias=biased,
        ),
        gated(card, biased=card.flag("mlp_bias", False)),
    )
    listed = card.values.get("attn_layer_indices") or []
    if not isinstance(listed, list):
        raise card.wrong("attn_layer_indices", "a list of layers")
    layers = [
        attention_spec if layer in listed else replace(attention_spec, mixer=mamba)
        for layer in range(num_layers(card))
    ]
    names = replace(NAMES, final_norm="model.final_layernorm")
    return decoder(card, layers, norm, names=names)


def _reals(card: ModelCard, key: str, count: int) -> tuple[float, ...]:
    """Return a list of ``count`` factors; ones if the card has none."""
    value = card.values.get(key)
    if value is None:
        return (1.0,) * count
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(type(each) in (int, float) and abs(each) <= _MOST for each in value)
    ):
        raise card.wrong(key, f"a list of {count} numbers from {-_MOST:g} to {_MOST:g}")
    return tuple(map(float, value))


def falcon_h1(card: ModelCard) -> DecoderSpec:
    """Falcon-H1: attention and Mamba 2 in parallel in every layer, with factors."""
    norm = rms(card, 1e-5)
    by_factor = "mamba_d_ssm" in card.values and not card.has("mamba_d_ssm")
    channels = expanded(card, "mamba_expand") if by_factor else card.whole("mamba_d_ssm", 1, MAX_WIDTH, 1024)
    normed = norm if card.flag("mamba_rms_norm", False) else None
    gate, channel, inputs, outputs, dt = _reals(card, "ssm_multipliers", 5)
    mamba = replace(
        _mamba2(card, normed, channels),
        norm_before_gate=normed is not None and card.flag("mamba_norm_before_gate", True),
        output_bias=card.flag("projectors_bias", False),
        multipliers=(gate, channel, inputs, outputs, dt),
    )
    biased = card.flag("attention_bias", False)
    attention_spec = attention(card, positions=8192, kv_heads=8, qkv_bias=biased, output_bias=biased)
    # A factor of keys is a factor of scores if keys have no bias.
    attention_spec = replace(attention_spec, scale=attention_spec.scale * factor(card, "key_multiplier"))
    if biased and factor(card, "key_multiplier") != 1.0:
        raise card.wrong("attention_bias", "false if key_multiplier is not 1")
    both = ParallelMixerSpec(
        state=mamba,
        attention=attention_spec,
        state_factors=(factor(card, "ssm_in_multiplier"), factor(card, "ssm_out_multiplier")),
        attention_factors=(
            factor(card, "attention_in_multiplier"),
            factor(card, "attention_out_multiplier"),
        ),
    )
    gate_factor, down_factor = _reals(card, "mlp_multipliers", 2)
    mlp = gated(
        card, biased=card.flag("mlp_bias", False), gate_multiplier=gate_factor, down_multiplier=down_factor
    )
    return decoder(
        card,
        (pre_norm(norm, both, mlp),) * num_layers(card),
        norm,
        names=replace(NAMES, final_norm="model.final_layernorm"),
        embedding_scale=factor(card, "embedding_multiplier"),
        logit_scale=factor(card, "lm_head_multiplier"),
    )


def granite_hybrid(card: ModelCard) -> DecoderSpec:
    """Granite 4: Mamba 2, and attention in some layers, with or without rotation."""
    norm = rms(card)
    rotated = card.values.get("position_embedding_type") == "rope"
    biased = card.flag("attention_bias", False)
    attention_spec = attention(
        card,
        positions=2048,
        rotated=rotated,
        scale=factor(card, "attention_multiplier"),
        qkv_bias=biased,
        output_bias=biased,
    )
    layer = pre_norm(
        norm, attention_spec, _granite_mlp(card), residual_multiplier=factor(card, "residual_multiplier")
    )
    mamba = replace(layer, mixer=_mamba2(card, norm, expanded(card, "mamba_expand")))
    kinds = ["mamba"] * num_layers(card)
    if card.has("layer_types"):
        kinds = layer_types(card, ("mamba", "linear_attention", "attention", "full_attention"))
    names = replace(
        Names(),
        state_mixer="mamba",
        gate_up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        router="block_sparse_moe.router.layer",
        experts_gate_up="block_sparse_moe.input_linear.weight",
        experts_down="block_sparse_moe.output_linear.weight",
        shared_gate_up="shared_mlp.input_linear",
        shared_down="shared_mlp.output_linear",
    )
    return decoder(
        card,
        [layer if kind in ("attention", "full_attention") else mamba for kind in kinds],
        norm,
        names=names,
        reach=max_positions(card, 2048) if attention_spec.rope is None else attention_spec.rope.reach,
        embedding_scale=factor(card, "embedding_multiplier"),
        logit_scale=1.0 / factor(card, "logits_scaling"),
    )


def _granite_mlp(card: ModelCard) -> FeedForwardSpec:
    """Return the shared feed-forward, combined with experts if the model has them."""
    shared = card.whole("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    if card.whole("num_local_experts", 0, MAX_EXPERTS, 8) == 0:
        return MlpSpec(width=shared, activation=Activation.SILU, layout=MlpLayout.STACKED)
    return ExpertsSpec(
        routing=routing(card, Scoring.SOFTMAX_OF_CHOSEN, 8, 2),
        width=expert_width(card, "intermediate_size", 11008),
        layout=ExpertsLayout.STACKED,
        shared_width=shared,
        shared_stacked=True,
    )


FAMILIES = {
    "JambaForCausalLM": Family(jamba, "Jamba"),
    "BambaForCausalLM": Family(bamba, "Bamba"),
    "FalconH1ForCausalLM": Family(falcon_h1, "Falcon-H1"),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid, "Granite 4 H"),
}
