"""GPT-2 and its descendants: StarCoder 1 and 2, GPT-J, CodeGen, GPT-NeoX and Pythia."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.rope import MAX_POSITIONS, rope_spec
from quintet.executor.model_config.shape import (
    HEADS,
    attention,
    decoder,
    head_width,
    layer_norm,
    max_positions,
    num_heads,
    num_layers,
    plain,
    plain_width,
    pre_norm,
    refuse,
    rotated_numbers,
    side_by_side,
    window,
    windowed,
)
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, PositionTable, QkvLayout

_GPT2_NAMES = Names(
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

_GPTJ = replace(
    _GPT2_NAMES,
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    qkv="attn.qkv_proj",
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask"),
)


def gpt2(card: ModelCard) -> DecoderSpec:
    """GPT-2: learned positions, transposed matrices."""
    layer = _gpt2_layer(card, "gelu_new", layout=QkvLayout.STACKED)
    layers, mixer = [layer] * num_layers(card), layer.attention
    if mixer is not None and card.flag("scale_attn_by_inverse_layer_idx", False):
        layers = [
            replace(layer, mixer=replace(mixer, scale=mixer.scale / (i + 1))) for i in range(len(layers))
        ]
    return _learned(card, tuple(layers), transposed=True)


def gpt_bigcode(card: ModelCard) -> DecoderSpec:
    """StarCoder, SantaCoder: GPT-2 with one KV head, or with one per query head, grouped by head."""
    single = card.flag("multi_query", True)
    layer = _gpt2_layer(
        card,
        "gelu_pytorch_tanh",
        num_kv_heads=1 if single else num_heads(card),
        layout=QkvLayout.STACKED if single else QkvLayout.GROUPED,
    )
    return _learned(card, (layer,) * num_layers(card))


def starcoder2(card: ModelCard) -> DecoderSpec:
    """StarCoder 2: rotation, a sliding window, biases."""
    biased, norm = card.flag("use_bias", True), layer_norm(card)
    mixer = attention(
        card, positions=4096, kv_heads=2, window=window(card), qkv_bias=biased, output_bias=biased
    )
    layer = pre_norm(norm, mixer, plain(card, "gelu_pytorch_tanh", biased=biased))
    names = Names(up="mlp.c_fc", down="mlp.c_proj")
    tied = card.flag("tie_word_embeddings", True)
    return decoder(card, (layer,) * num_layers(card), norm, names=names, tied=tied)


def gpt_neo(card: ModelCard) -> DecoderSpec:
    """GPT-Neo: learned positions, unscaled scores; local layers have a sliding window."""
    width, kinds = card.whole("window_size", 1, MAX_POSITIONS, 256), card.values.get("attention_layers")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers(card)
        or any(kind not in ("global", "local") for kind in kinds)
    ):
        raise card.wrong("attention_layers", f"a list of {num_layers(card)} words, each global or local")
    mixer = attention(card, rotated=False, scale=1.0, output_bias=True)
    layer = pre_norm(layer_norm(card), mixer, plain(card, "gelu_new", biased=True))
    layers = windowed(layer, (width if kind == "local" else None for kind in kinds))
    names = replace(
        _GPT2_NAMES,
        q="attn.attention.q_proj",
        k="attn.attention.k_proj",
        v="attn.attention.v_proj",
        output="attn.attention.out_proj",
        ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
    )
    return _learned(card, layers, names=names)


def gptj(card: ModelCard, **switches: Any) -> DecoderSpec:
    """GPT-J: parallel attention and feed-forward after one norm, interleaved rotation."""
    dim, norm = head_width(card), layer_norm(card)
    rope = rope_spec(card, dim, 2048, rotary_dim=rotated_numbers(card, dim, 64))
    mixer = attention(card, rope=rope, interleaved=True, **switches)
    mlp = plain(card, "gelu_new", width=plain_width(card, "n_inner"), biased=True)
    layers = (side_by_side(norm, mixer, mlp),) * num_layers(card)
    return decoder(card, layers, norm, names=_GPTJ, head_bias=True)


def codegen(card: ModelCard) -> DecoderSpec:
    """CodeGen, CodeGen 2: GPT-J with queries, values and keys in four parts of one tensor."""
    if num_heads(card) % 4:
        raise card.wrong(HEADS, "a multiple of 4")
    return gptj(card, layout=QkvLayout.QUARTERS)


def persimmon(card: ModelCard) -> DecoderSpec:
    """Persimmon: norms of queries and keys, squared ReLU."""
    norm, normed = layer_norm(card), card.flag("qk_layernorm", True)
    mixer = attention(
        card,
        positions=16384,
        share=0.5,
        qkv_bias=True,
        output_bias=True,
        qk_norm=norm if normed else None,
        layout=QkvLayout.GROUPED,
    )
    layer = pre_norm(norm, mixer, plain(card, "relu2", biased=True))
    return decoder(card, (layer,) * num_layers(card), norm, names=_PERSIMMON)


def gpt_neox(card: ModelCard) -> DecoderSpec:
    """GPT-NeoX, Pythia: parallel layers with two norms, or sequential ones."""
    norm, biased = layer_norm(card), card.flag("attention_bias", True)
    mixer = attention(
        card, positions=2048, share=0.25, qkv_bias=biased, output_bias=biased, layout=QkvLayout.GROUPED
    )
    mlp = plain(card, "gelu", biased=True)
    layer = pre_norm(norm, mixer, mlp, parallel=card.flag("use_parallel_residual", True))
    return decoder(card, (layer,) * num_layers(card), norm, names=_NEOX)


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


def _gpt2_layer(card: ModelCard, activation: str, **switches: Any) -> LayerSpec:
    refuse(card, "add_cross_attention")
    scale = head_width(card) ** -0.5 if card.flag("scale_attn_weights", True) else 1.0
    mixer = attention(card, rotated=False, scale=scale, qkv_bias=True, output_bias=True, **switches)
    mlp = plain(card, activation, width=plain_width(card, "n_inner"), biased=True)
    return pre_norm(layer_norm(card), mixer, mlp)


def _learned(card: ModelCard, layers: tuple[LayerSpec, ...], **switches: Any) -> DecoderSpec:
    positions = PositionTable(count=max_positions(card, 1024))
    tied = card.flag("tie_word_embeddings", True)
    usual: dict[str, Any] = {"names": _GPT2_NAMES, "positions": positions, "tied": tied}
    return decoder(card, layers, layer_norm(card), **(usual | switches))


FAMILIES = {
    "GPT2LMHeadModel": Family(gpt2, "GPT-2"),
    "GPTBigCodeForCausalLM": Family(gpt_bigcode, "StarCoder, SantaCoder"),
    "Starcoder2ForCausalLM": Family(starcoder2, "StarCoder 2"),
    "GPTNeoForCausalLM": Family(gpt_neo, "GPT-Neo"),
    "GPTJForCausalLM": Family(gptj, "GPT-J"),
    "CodeGenForCausalLM": Family(codegen, "CodeGen"),
    "GPTNeoXForCausalLM": Family(gpt_neox, "GPT-NeoX, Pythia, Dolly"),
    "PersimmonForCausalLM": Family(persimmon, "Persimmon"),
}
