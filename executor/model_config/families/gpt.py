"""GPT-2 and its descendants: StarCoder 1 and 2, GPT-J, CodeGen, GPT-NeoX and Pythia; OPT, BioGPT and XGLM.

Also Phi 1 and 2 and Command, which have parallel blocks like GPT-J.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS, rope_spec
from quintet.executor.model_config.shape import (
    HEADS,
    HIDDEN,
    MAX_WIDTH,
    SLIDING,
    WIDTH,
    Family,
    attention,
    decoder,
    every_full,
    gated,
    head_width,
    hidden_size,
    layer_kinds,
    layer_norm,
    max_positions,
    normed_layer,
    num_heads,
    num_layers,
    plain,
    plain_width,
    pre_norm,
    pre_norm_decoder,
    refuse,
    rotated_numbers,
    rotated_reach,
    side_by_side,
    window,
    windowed,
)
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    NormKind,
    Norms,
    NormSpec,
    PositionTable,
    QkNormOver,
    QkvLayout,
)

GPT2_NAMES = Names(
    prefix="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{layer}",
    final_norm="transformer.ln_f",
    mixer_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)

GPT_NEO_NAMES = replace(
    GPT2_NAMES,
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    output="attn.attention.out_proj",
    ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
)

_GPTJ = replace(
    GPT2_NAMES,
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    qkv="attn.qkv_proj",
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask"),
)


def gpt2(hf_config: HfConfig) -> DecoderSpec:
    """GPT-2: learned positions, transposed matrices."""
    layer = _gpt2_layer(hf_config, "gelu_new", layout=QkvLayout.STACKED)
    layers, mixer = [layer] * num_layers(hf_config), layer.attention
    if mixer is not None and hf_config.flag("scale_attn_by_inverse_layer_idx", False):
        layers = [
            replace(layer, mixer=replace(mixer, scale=mixer.scale / (i + 1))) for i in range(len(layers))
        ]
    return _learned(hf_config, layers, transposed=True)


def gpt_bigcode(hf_config: HfConfig) -> DecoderSpec:
    """StarCoder, SantaCoder: GPT-2 with one KV head, or with one per query head, grouped by head."""
    single = hf_config.flag("multi_query", True)
    layer = _gpt2_layer(
        hf_config,
        "gelu_pytorch_tanh",
        num_kv_heads=1 if single else num_heads(hf_config),
        layout=QkvLayout.STACKED if single else QkvLayout.GROUPED,
    )
    return _learned(hf_config, layer)


def starcoder2(hf_config: HfConfig) -> DecoderSpec:
    """StarCoder 2: rotation, a sliding window, biases."""
    biased, norm = hf_config.flag("use_bias", True), layer_norm(hf_config)
    mixer = attention(hf_config, positions=4096, kv_heads=2, window=window(hf_config), biased=biased)
    mlp, names = plain(hf_config, "gelu_pytorch_tanh", biased=biased), Names(up="mlp.c_fc", down="mlp.c_proj")
    return pre_norm_decoder(hf_config, norm, mixer, mlp, names=names, usually_tied=True)


def gpt_neo(hf_config: HfConfig) -> DecoderSpec:
    """GPT-Neo: learned positions, unscaled scores; local layers have a sliding window."""
    width = hf_config.whole("window_size", 1, MAX_POSITIONS, 256)
    kinds = hf_config.values.get("attention_layers")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers(hf_config)
        or any(kind not in ("global", "local") for kind in kinds)
    ):
        raise hf_config.wrong(
            "attention_layers", f"a list of {num_layers(hf_config)} words, each global or local"
        )
    mixer = attention(hf_config, rotated=False, scale=1.0, output_bias=True)
    layer = pre_norm(layer_norm(hf_config), mixer, plain(hf_config, "gelu_new", biased=True))
    layers = windowed(layer, [width if kind == "local" else None for kind in kinds])
    return _learned(hf_config, layers, names=GPT_NEO_NAMES)


def gptj(hf_config: HfConfig, **switches: Any) -> DecoderSpec:
    """GPT-J: parallel attention and feed-forward after one norm, interleaved rotation."""
    dim, norm = head_width(hf_config), layer_norm(hf_config)
    rope = rope_spec(hf_config, dim, 2048, rotary_dim=rotated_numbers(hf_config, dim, 64))
    mixer = attention(hf_config, rope=rope, interleaved=True, **switches)
    mlp = plain(hf_config, "gelu_new", width=plain_width(hf_config, "n_inner"), biased=True)
    return decoder(hf_config, side_by_side(norm, mixer, mlp), norm, names=_GPTJ, head_bias=True)


def codegen(hf_config: HfConfig) -> DecoderSpec:
    """CodeGen, CodeGen 2: GPT-J with queries, values and keys in four parts of one tensor."""
    if num_heads(hf_config) % 4:
        raise hf_config.wrong(HEADS, "a multiple of 4")
    return gptj(hf_config, layout=QkvLayout.QUARTERS, num_kv_heads=num_heads(hf_config))


def persimmon(hf_config: HfConfig) -> DecoderSpec:
    """Persimmon: norms of queries and keys, squared ReLU."""
    norm, normed = layer_norm(hf_config), hf_config.flag("qk_layernorm", True)
    mixer = attention(
        hf_config,
        positions=16384,
        share=0.5,
        biased=True,
        qk_norm=norm if normed else None,
        layout=QkvLayout.GROUPED,
    )
    mlp = plain(hf_config, "relu2", biased=True)
    return pre_norm_decoder(hf_config, norm, mixer, mlp, names=_PERSIMMON)


def gpt_neox(hf_config: HfConfig) -> DecoderSpec:
    """GPT-NeoX, Pythia: parallel layers with two norms, or sequential ones."""
    norm, biased = layer_norm(hf_config), hf_config.flag("attention_bias", True)
    mixer = attention(hf_config, positions=2048, share=0.25, biased=biased, layout=QkvLayout.GROUPED)
    mlp = plain(hf_config, "gelu", biased=True)
    layer = pre_norm(norm, mixer, mlp, parallel=hf_config.flag("use_parallel_residual", True))
    return decoder(hf_config, layer, norm, names=_NEOX)


_NEOX = Names(
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{layer}",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv="attention.query_key_value",
    output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("*.attention.bias", "*.attention.masked_bias"),
)

_PERSIMMON = Names(
    final_norm="model.final_layernorm",
    qkv="self_attn.query_key_value",
    output="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _gpt2_layer(hf_config: HfConfig, activation: str, **switches: Any) -> LayerSpec:
    refuse(hf_config, "add_cross_attention")
    scale = head_width(hf_config) ** -0.5 if hf_config.flag("scale_attn_weights", True) else 1.0
    mixer = attention(hf_config, rotated=False, scale=scale, biased=True, **switches)
    mlp = plain(hf_config, activation, width=plain_width(hf_config, "n_inner"), biased=True)
    return pre_norm(layer_norm(hf_config), mixer, mlp)


def _learned(hf_config: HfConfig, layers: LayerSpec | Sequence[LayerSpec], **switches: Any) -> DecoderSpec:
    positions = PositionTable(count=max_positions(hf_config, 1024))
    usual: dict[str, Any] = {"names": GPT2_NAMES, "positions": positions, "usually_tied": True}
    return decoder(hf_config, layers, layer_norm(hf_config), **(usual | switches))


_OPT = Names(
    prefix="model.",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    layer="model.decoder.layers.{layer}",
    final_norm="model.decoder.final_layer_norm",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)

_BIOGPT = replace(
    _OPT,
    prefix="biogpt.",
    embedding="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    layer="biogpt.layers.{layer}",
    final_norm="biogpt.layer_norm",
    head="output_projection",
)

_XGLM = replace(
    _OPT,
    embedding="model.embed_tokens",
    layer="model.layers.{layer}",
    final_norm="model.layer_norm",
    ignored=("model.embed_positions.weights",),
)


def opt(hf_config: HfConfig) -> DecoderSpec:
    """OPT: learned positions with offset 2; 350m has norms after the residual sums and a narrower embedding."""
    biased = hf_config.flag("enable_bias", True)
    affine = hf_config.flag("layer_norm_elementwise_affine", True)
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, weighted=affine, biased=affine)
    mixer = attention(hf_config, rotated=False, biased=biased)
    mlp = plain(hf_config, "relu", width=plain_width(hf_config, "ffn_dim"), biased=biased)
    before = hf_config.flag("do_layer_norm_before", True)
    layer = normed_layer(Norms(before=norm) if before else Norms(of_sum=norm), mixer, mlp)
    hidden = hidden_size(hf_config)
    width = hf_config.whole("word_embed_proj_dim", 1, MAX_WIDTH, hidden)
    return decoder(
        hf_config,
        layer,
        norm if before and not hf_config.flag("_remove_final_layer_norm", False) else None,
        names=_OPT,
        positions=PositionTable(count=max_positions(hf_config, 2048), offset=2),
        embedding_width=None if width == hidden else width,
        usually_tied=True,
    )


def biogpt(hf_config: HfConfig) -> DecoderSpec:
    """BioGPT: OPT with scaled embeddings."""
    positions = PositionTable(count=max_positions(hf_config, 1024), offset=2)
    return _scaled_opt(hf_config, plain_width(hf_config, WIDTH), positions, _BIOGPT)


def xglm(hf_config: HfConfig) -> DecoderSpec:
    """XGLM: sinusoidal positions, scaled embeddings."""
    refuse(hf_config, "add_cross_attention")
    if hidden_size(hf_config) < 4:
        raise hf_config.wrong(HIDDEN, "at least 4, for sinusoidal positions")
    positions = PositionTable(count=max_positions(hf_config, 2048), offset=2, sinusoidal=True)
    return _scaled_opt(hf_config, plain_width(hf_config, "ffn_dim"), positions, _XGLM)


def _scaled_opt(hf_config: HfConfig, width: int, positions: PositionTable, names: Names) -> DecoderSpec:
    norm = NormSpec(kind=NormKind.LAYER, eps=1e-5, biased=True)
    mixer = attention(hf_config, rotated=False, biased=True)
    mlp = plain(hf_config, "gelu", width=width, biased=True)
    scale = hidden_size(hf_config) ** 0.5 if hf_config.flag("scale_embedding", True) else 1.0
    return pre_norm_decoder(
        *(hf_config, norm, mixer, mlp),
        names=names,
        positions=positions,
        embedding_scale=scale,
        usually_tied=True,
    )


def phi(hf_config: HfConfig) -> DecoderSpec:
    """Phi 1 and 2: parallel attention and feed-forward after one norm, biases, half of each head rotated."""
    norm, normed = layer_norm(hf_config), hf_config.flag("qk_layernorm", False)
    mixer = attention(
        hf_config,
        positions=2048,
        share=0.5,
        biased=True,
        qk_norm=norm if normed else None,
    )
    layer = side_by_side(norm, mixer, plain(hf_config, "gelu_new", biased=True))
    names = Names(
        final_norm="model.final_layernorm",
        output="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
    )
    return decoder(hf_config, layer, norm, names=names, head_bias=True)


def cohere(hf_config: HfConfig) -> DecoderSpec:
    """Command R; R+ norms queries and keys with separate weights per head."""
    norm = layer_norm(hf_config, biased=False)
    normed = hf_config.flag("use_qk_norm", False)
    mixer = attention(
        hf_config,
        positions=8192,
        theta=500000.0,
        interleaved=True,
        bias_key="attention_bias",
        qk_norm=norm if normed else None,
        qk_norm_over=QkNormOver.OWN,
    )
    return _cohere_decoder(hf_config, (mixer,) * num_layers(hf_config))


def cohere2(hf_config: HfConfig) -> DecoderSpec:
    """Command R7B and A: three of four layers have a sliding window and rotation; the others have neither."""
    mixer = attention(hf_config, positions=8192, interleaved=True, bias_key="attention_bias")
    sliding, full = replace(mixer, window=window(hf_config, 4096)), replace(mixer, rope=None)
    kinds = layer_kinds(
        hf_config, every_full(hf_config, hf_config.whole("sliding_window_pattern", 1, 1024, 4))
    )
    return _cohere_decoder(hf_config, tuple(sliding if kind == SLIDING else full for kind in kinds))


def _cohere_decoder(hf_config: HfConfig, mixers: tuple[AttentionSpec, ...]) -> DecoderSpec:
    """Build the decoder; a config's ``model_max_length``, if present, is the final context length."""
    norm, mlp = layer_norm(hf_config, biased=False), gated(hf_config)
    reach = rotated_reach(hf_config, [mixer.rope for mixer in mixers])
    return decoder(
        hf_config,
        tuple(side_by_side(norm, mixer, mlp) for mixer in mixers),
        norm,
        usually_tied=True,
        reach=hf_config.whole("model_max_length", 1, MAX_POSITIONS, reach),
        logit_scale=hf_config.real("logit_scale", 1e-6, 1e6, 0.0625),
    )


FAMILIES = {
    "GPT2LMHeadModel": Family(gpt2, "GPT-2"),
    "GPTBigCodeForCausalLM": Family(gpt_bigcode, "StarCoder, SantaCoder"),
    "Starcoder2ForCausalLM": Family(starcoder2, "StarCoder 2"),
    "GPTNeoForCausalLM": Family(gpt_neo, "GPT-Neo"),
    "GPTJForCausalLM": Family(gptj, "GPT-J"),
    "CodeGenForCausalLM": Family(codegen, "CodeGen"),
    "GPTNeoXForCausalLM": Family(gpt_neox, "GPT-NeoX, Pythia, Dolly"),
    "PersimmonForCausalLM": Family(persimmon, "Persimmon"),
    "OPTForCausalLM": Family(opt, "OPT, Galactica"),
    "XGLMForCausalLM": Family(xglm, "XGLM"),
    "BioGptForCausalLM": Family(biogpt, "BioGPT"),
    "PhiForCausalLM": Family(phi, "Phi 1, 1.5 and 2"),
    "CohereForCausalLM": Family(cohere, "Command R and R+, Aya"),
    "Cohere2ForCausalLM": Family(cohere2, "Command R7B and A"),
}
