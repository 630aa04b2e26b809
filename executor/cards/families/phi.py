"""Phi 1, 1.5 and 2; Phi 3, 3.5 and 4."""

from __future__ import annotations

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.families.shape import (
    attention,
    decoder,
    gated,
    layer_norm,
    num_layers,
    plain,
    pre_norm,
    rms,
    side_by_side,
    window,
)
from quintet.executor.cards.family import Family
from quintet.executor.cards.names import Names
from quintet.executor.cards.spec import DecoderSpec, MlpLayout, QkvLayout


def phi(card: ModelCard) -> DecoderSpec:
    """Phi 1 and 2: attention and feed-forward side by side behind one norm, biases everywhere, half of a head rotated."""
    norm, normed = layer_norm(card), card.flag("qk_layernorm", False)
    mixer = attention(
        card, positions=2048, share=0.5, qkv_bias=True, output_bias=True, qk_norm=norm if normed else None
    )
    layer = side_by_side(norm, mixer, plain(card, "gelu_new", biased=True))
    names = Names(
        final_norm="model.final_layernorm",
        output="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
    )
    return decoder(card, (layer,) * num_layers(card), norm, names=names, head_bias=True)


def phi3(card: ModelCard) -> DecoderSpec:
    """Phi 3 and 4: Llama with stacked tensors."""
    norm = rms(card, 1e-5)
    mixer = attention(card, positions=4096, window=window(card), layout=QkvLayout.STACKED)
    layer = pre_norm(norm, mixer, gated(card, layout=MlpLayout.STACKED))
    return decoder(card, (layer,) * num_layers(card), norm)


FAMILIES = {
    "PhiForCausalLM": Family(phi, "Phi 1, 1.5 and 2"),
    "Phi3ForCausalLM": Family(phi3, "Phi 3, 3.5 and 4"),
}
