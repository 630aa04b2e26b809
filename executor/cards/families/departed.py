"""Baichuan, InternLM 1 and 2, Aquila, Qwen 1: families whose classes transformers no longer has, by their own cards and names."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.families.llama import llama
from quintet.executor.cards.families.shape import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    alibi_slopes,
    attention,
    decoder,
    gated,
    max_positions,
    num_heads,
    num_layers,
    pre_norm,
    rms,
)
from quintet.executor.cards.family import Family
from quintet.executor.cards.names import Names
from quintet.executor.cards.rope import MAX_POSITIONS
from quintet.executor.cards.spec import DecoderSpec, QkvLayout

_QWEN1 = Names(
    prefix="transformer.",
    embedding="transformer.wte",
    layer="transformer.h.{layer}",
    final_norm="transformer.ln_f",
    mixer_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    output="attn.c_proj",
    gate="mlp.w2",
    up="mlp.w1",
    down="mlp.c_proj",
    ignored=("*.attn.masked_bias",),
)


def baichuan(card: ModelCard) -> DecoderSpec:
    """Baichuan 1 and 2: 7B rotates; 13B has ALiBi, and ``model_max_length`` instead of ``max_position_embeddings``."""
    rotated, norm = card.has("max_position_embeddings"), rms(card)
    mixer = attention(
        card,
        rotated=rotated,
        alibi=() if rotated else alibi_slopes(num_heads(card)),
        layout=QkvLayout.STACKED,
    )
    return decoder(
        card,
        (pre_norm(norm, mixer, gated(card)),) * num_layers(card),
        norm,
        names=Names(qkv="self_attn.W_pack"),
        reach=card.whole(("max_position_embeddings", "model_max_length"), 1, MAX_POSITIONS, 4096),
        normalised_head=card.has("z_loss_weight"),
    )


def internlm(card: ModelCard) -> DecoderSpec:
    """InternLM 1: biases on all of attention."""
    biased, norm = card.flag("bias", True), rms(card)
    base = card.section("rotary").real("base", 2.0, 1e15, 10000.0)
    mixer = attention(card, positions=2048, theta=base, qkv_bias=biased, output_bias=biased)
    return decoder(card, (pre_norm(norm, mixer, gated(card)),) * num_layers(card), norm)


def internlm2(card: ModelCard) -> DecoderSpec:
    """InternLM 2: each KV head's queries, key and value side by side."""
    biased, norm = card.flag("bias", True), rms(card)
    mixer = attention(card, positions=32768, qkv_bias=biased, output_bias=biased, layout=QkvLayout.GROUPED)
    names = Names(
        embedding="model.tok_embeddings",
        head="output",
        mixer_norm="attention_norm",
        mlp_norm="ffn_norm",
        qkv="attention.wqkv",
        output="attention.wo",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
    )
    return decoder(card, (pre_norm(norm, mixer, gated(card)),) * num_layers(card), norm, names=names)


def qwen1(card: ModelCard) -> DecoderSpec:
    """Qwen 1, up to its ``seq_length``: beyond, its own stretching of the rotation and of the queries begins."""
    biased, norm = not card.flag("no_bias", True), rms(card)
    dim = card.whole("kv_channels", 1, MAX_HEAD_DIM, 128)
    mixer = attention(
        card,
        positions=8192,
        head_dim=dim,
        theta=card.real("rotary_emb_base", 2.0, 1e15, 10000.0),
        qkv_bias=True,
        output_bias=biased,
        layout=QkvLayout.STACKED,
    )
    width = card.whole("intermediate_size", 2, MAX_WIDTH) // 2
    mlp = replace(gated(card, biased=biased), width=width)
    layers = (pre_norm(norm, mixer, mlp),) * num_layers(card)
    reach = card.whole("seq_length", 1, MAX_POSITIONS, 8192)
    return decoder(card, layers, norm, names=_QWEN1, reach=min(reach, max_positions(card, reach)))


FAMILIES = {
    "BaichuanForCausalLM": Family(baichuan, "Baichuan 13B; Baichuan 2"),
    "BaiChuanForCausalLM": Family(baichuan, "Baichuan 7B"),
    "InternLMForCausalLM": Family(internlm, "InternLM 1"),
    "InternLM2ForCausalLM": Family(internlm2, "InternLM 2 and 2.5"),
    "AquilaModel": Family(llama, "Aquila"),
    "AquilaForCausalLM": Family(llama, "Aquila 2"),
    "QWenLMHeadModel": Family(qwen1, "Qwen 1"),
}
