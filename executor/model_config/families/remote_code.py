"""Families without classes in transformers: Baichuan, InternLM 1 and 2, Aquila, Qwen 1, EXAONE 3, ChatGLM, Tele-FLM."""

from __future__ import annotations

import math
from dataclasses import replace

from quintet.executor.model_config.families.falcon import alibi_slopes
from quintet.executor.model_config.families.gpt import GPT2_NAMES, GPT_NEO_NAMES
from quintet.executor.model_config.families.llama import llama
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS, rope_spec
from quintet.executor.model_config.shape import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    Family,
    attention,
    decoder,
    factor,
    gated,
    head_width,
    max_positions,
    num_heads,
    num_kv_heads,
    pre_norm,
    pre_norm_decoder,
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

_QWEN1 = replace(GPT2_NAMES, gate="mlp.w2", up="mlp.w1", ignored=("*.attn.masked_bias",))

_EXAONE = replace(GPT_NEO_NAMES, gate="mlp.c_fc_0", up="mlp.c_fc_1", ignored=())
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


def baichuan(hf_config: HfConfig) -> DecoderSpec:
    """Baichuan 1 and 2: 7B has rotation; 13B has ALiBi, and ``model_max_length`` for ``max_position_embeddings``."""
    rotated, norm = hf_config.has("max_position_embeddings"), rms(hf_config)
    mixer = attention(
        hf_config,
        rotated=rotated,
        alibi=() if rotated else alibi_slopes(num_heads(hf_config)),
        layout=QkvLayout.STACKED,
    )
    return pre_norm_decoder(
        *(hf_config, norm, mixer, gated(hf_config)),
        names=Names(qkv="self_attn.W_pack"),
        reach=hf_config.whole(("max_position_embeddings", "model_max_length"), 1, MAX_POSITIONS, 4096),
        normalised_head=hf_config.has("z_loss_weight"),
    )


def internlm(hf_config: HfConfig) -> DecoderSpec:
    """InternLM 1: biases of all attention projections."""
    biased, norm = hf_config.flag("bias", True), rms(hf_config)
    base = hf_config.section("rotary").real("base", 2.0, 1e15, 10000.0)
    mixer = attention(hf_config, positions=2048, theta=base, biased=biased)
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config))


def internlm2(hf_config: HfConfig) -> DecoderSpec:
    """InternLM 2: queries, keys and values grouped by KV head."""
    biased, norm = hf_config.flag("bias", True), rms(hf_config)
    mixer = attention(hf_config, positions=32768, biased=biased, layout=QkvLayout.GROUPED)
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
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config), names=names)


def qwen1(hf_config: HfConfig) -> DecoderSpec:
    """Qwen 1. Beyond ``seq_length``, the trained length, rotations and queries are scaled if the config enables it."""
    biased, norm = not hf_config.flag("no_bias", True), rms(hf_config)
    dim = hf_config.whole("kv_channels", 1, MAX_HEAD_DIM, 128)
    mixer = attention(
        hf_config,
        positions=8192,
        head_dim=dim,
        qkv_bias=True,
        output_bias=biased,
        layout=QkvLayout.STACKED,
    )
    trained = hf_config.whole("seq_length", 2, MAX_POSITIONS, 8192)
    reach = max_positions(hf_config, trained)
    if reach > trained and mixer.rope is not None and dim >= 4 and hf_config.flag("use_dynamic_ntk", True):
        mixer = replace(mixer, rope=replace(mixer.rope, kind="stairs", original_positions=trained))
        if hf_config.flag("use_logn_attn", True):
            temperature = Temperature(1 / math.log(trained), trained, 1 - trained, whole=False)
            mixer = replace(mixer, temperature=temperature)
    else:
        reach = min(trained, reach)
    width = hf_config.whole("intermediate_size", 2, MAX_WIDTH) // 2
    mlp = replace(gated(hf_config, biased=biased), width=width)
    return pre_norm_decoder(hf_config, norm, mixer, mlp, names=_QWEN1, reach=reach)


def exaone(hf_config: HfConfig) -> DecoderSpec:
    """EXAONE 3 and 3.5: Llama with GPT-2's tensor names."""
    norm = rms(hf_config, 1e-5)
    mixer = attention(hf_config, positions=2048)
    return pre_norm_decoder(hf_config, norm, mixer, gated(hf_config), names=_EXAONE)


def chatglm(hf_config: HfConfig) -> DecoderSpec:
    """ChatGLM 2 and 3, CodeGeeX 2, GLM-4-9B by its own code: interleaved rotation of half of each head."""
    refuse(hf_config, "position_encoding_2d")
    eps = hf_config.real("layernorm_epsilon", 1e-12, 1.0, 1e-5)
    is_rms, biased = hf_config.flag("rmsnorm", True), hf_config.flag("add_bias_linear", False)
    norm = NormSpec(kind=NormKind.RMS if is_rms else NormKind.LAYER, eps=eps, biased=not is_rms)
    dim = head_width(hf_config, hf_config.whole("kv_channels", 1, MAX_HEAD_DIM, 128))
    mixer = attention(
        *(hf_config,),
        num_kv_heads=num_kv_heads(hf_config)
        if hf_config.flag("multi_query_attention", False)
        else num_heads(hf_config),
        head_dim=dim,
        rope=rope_spec(
            hf_config, dim, 2048, theta=10000 * hf_config.real("rope_ratio", 1e-3, 1e9, 1.0), share=0.5
        ),
        interleaved=True,
        qkv_bias=biased or hf_config.flag("add_qkv_bias", False),
        output_bias=biased,
        layout=QkvLayout.STACKED,
    )
    width = hf_config.whole("ffn_hidden_size", 1, MAX_WIDTH, 13696)
    layer = pre_norm(norm, mixer, gated(hf_config, width=width, biased=biased, layout=MlpLayout.STACKED))
    return decoder(
        hf_config, layer, norm if hf_config.flag("post_layer_norm", True) else None, names=_CHATGLM
    )


def tele_flm(hf_config: HfConfig) -> DecoderSpec:
    """Tele-FLM: Llama with muP factors of embeddings and logits."""
    spec = llama(hf_config)
    if not hf_config.flag("use_mup", False):
        return spec
    logit_scale = factor(hf_config, "output_mult") / factor(hf_config, "mup_scale_factor")
    return replace(spec, embedding_scale=factor(hf_config, "input_mult"), logit_scale=logit_scale)


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
