"""Families without classes in transformers: Baichuan, InternLM 1 and 2, Aquila, Qwen 1, EXAONE 3, ChatGLM, Tele-FLM."""

from __future__ import annotations

import math
from dataclasses import replace

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.families.llama import llama
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS, rope_spec
from quintet.executor.model_config.shape import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    alibi_slopes,
    attention,
    decoder,
    factor,
    gated,
    head_width,
    max_positions,
    num_heads,
    num_kv_heads,
    num_layers,
    pre_norm,
    refuse,
    rms,
)
from quintet.executor.model_config.spec import (
    DecoderSpec,
    MlpLayout,
    NormKind,
    NormSpec,
    QkvLayout,
    Temperature,
)

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

_EXAONE = Names(
    prefix="transformer.",
    embedding="transformer.wte",
    layer="transformer.h.{layer}",
    final_norm="transformer.ln_f",
    mixer_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    output="attn.attention.out_proj",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
)
_CHATGLM = Names(
    prefix="transformer.",
    embedding="transformer.embedding.word_embeddings",
    layer="transformer.encoder.layers.{layer}",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    qkv="self_attention.query_key_value",
    output="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("transformer.rotary_pos_emb.*",),
)


def baichuan(card: ModelCard) -> DecoderSpec:
    """Baichuan 1 and 2: 7B has rotation; 13B has ALiBi, and ``model_max_length`` for ``max_position_embeddings``."""
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
    """InternLM 1: biases of all attention projections."""
    biased, norm = card.flag("bias", True), rms(card)
    base = card.section("rotary").real("base", 2.0, 1e15, 10000.0)
    mixer = attention(card, positions=2048, theta=base, qkv_bias=biased, output_bias=biased)
    return decoder(card, (pre_norm(norm, mixer, gated(card)),) * num_layers(card), norm)


def internlm2(card: ModelCard) -> DecoderSpec:
    """InternLM 2: queries, keys and values grouped by KV head."""
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
    """Qwen 1. Beyond ``seq_length``, the trained length, rotations and queries are scaled if the card enables it."""
    biased, norm = not card.flag("no_bias", True), rms(card)
    dim = card.whole("kv_channels", 1, MAX_HEAD_DIM, 128)
    mixer = attention(
        card,
        positions=8192,
        head_dim=dim,
        qkv_bias=True,
        output_bias=biased,
        layout=QkvLayout.STACKED,
    )
    trained = card.whole("seq_length", 2, MAX_POSITIONS, 8192)
    reach = max_positions(card, trained)
    if reach > trained and mixer.rope is not None and dim >= 4 and card.flag("use_dynamic_ntk", True):
        mixer = replace(mixer, rope=replace(mixer.rope, kind="stairs", original_positions=trained))
        if card.flag("use_logn_attn", True):
            temperature = Temperature(1 / math.log(trained), trained, 1 - trained, whole=False)
            mixer = replace(mixer, temperature=temperature)
    else:
        reach = min(trained, reach)
    width = card.whole("intermediate_size", 2, MAX_WIDTH) // 2
    mlp = replace(gated(card, biased=biased), width=width)
    layers = (pre_norm(norm, mixer, mlp),) * num_layers(card)
    return decoder(card, layers, norm, names=_QWEN1, reach=reach)


def exaone(card: ModelCard) -> DecoderSpec:
    """EXAONE 3 and 3.5: Llama with GPT-2's tensor names."""
    norm = rms(card, 1e-5)
    layer = pre_norm(norm, attention(card, positions=2048), gated(card))
    return decoder(card, (layer,) * num_layers(card), norm, names=_EXAONE)


def chatglm(card: ModelCard) -> DecoderSpec:
    """ChatGLM 2 and 3, CodeGeeX 2, GLM-4-9B by its own code: interleaved rotation of half of each head."""
    refuse(card, "position_encoding_2d")
    eps = card.real("layernorm_epsilon", 1e-12, 1.0, 1e-5)
    is_rms, biased = card.flag("rmsnorm", True), card.flag("add_bias_linear", False)
    norm = NormSpec(kind=NormKind.RMS if is_rms else NormKind.LAYER, eps=eps, biased=not is_rms)
    dim = head_width(card, card.whole("kv_channels", 1, MAX_HEAD_DIM, 128))
    mixer = attention(
        *(card,),
        num_kv_heads=num_kv_heads(card) if card.flag("multi_query_attention", False) else num_heads(card),
        head_dim=dim,
        rope=rope_spec(card, dim, 2048, theta=10000 * card.real("rope_ratio", 1e-3, 1e9, 1.0), share=0.5),
        interleaved=True,
        qkv_bias=biased or card.flag("add_qkv_bias", False),
        output_bias=biased,
        layout=QkvLayout.STACKED,
    )
    width = card.whole("ffn_hidden_size", 1, MAX_WIDTH, 13696)
    layer = pre_norm(norm, mixer, gated(card, width=width, biased=biased, layout=MlpLayout.STACKED))
    return decoder(
        *(card, (layer,) * num_layers(card), norm if card.flag("post_layer_norm", True) else None),
        names=_CHATGLM,
    )


def tele_flm(card: ModelCard) -> DecoderSpec:
    """Tele-FLM: Llama with muP factors of embeddings and logits."""
    spec = llama(card)
    if not card.flag("use_mup", False):
        return spec
    logit_scale = factor(card, "output_mult") / factor(card, "mup_scale_factor")
    return replace(spec, embedding_scale=factor(card, "input_mult"), logit_scale=logit_scale)


FAMILIES = {
    "ExaoneForCausalLM": Family(exaone, "EXAONE 3 and 3.5"),
    "ChatGLMModel": Family(chatglm, "ChatGLM 2 and 3, GLM-4-9B, by their own code"),
    "ChatGLMForConditionalGeneration": Family(chatglm, "ChatGLM 2 and 3, GLM-4-9B, by their own code"),
    "TeleFLMForCausalLM": Family(tele_flm, "Tele-FLM"),
    "BaichuanForCausalLM": Family(baichuan, "Baichuan 13B; Baichuan 2"),
    "BaiChuanForCausalLM": Family(baichuan, "Baichuan 7B"),
    "InternLMForCausalLM": Family(internlm, "InternLM 1"),
    "InternLM2ForCausalLM": Family(internlm2, "InternLM 2 and 2.5"),
    "AquilaModel": Family(llama, "Aquila"),
    "AquilaForCausalLM": Family(llama, "Aquila 2"),
    "QWenLMHeadModel": Family(qwen1, "Qwen 1"),
}
