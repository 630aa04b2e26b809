"""Architecture-specific config values of recurrent models. Imports no torch."""

from __future__ import annotations

from quintet.executor.checkpoints.gguf.attention_values import experts
from quintet.executor.checkpoints.gguf.common_values import (
    DELTA,
    GRANITE,
    MAMBA,
    MAMBA_OF_HYBRID,
    NEMOTRON_H,
    Values,
    num_layers,
)
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata


def lfm2(metadata: GgufMetadata) -> Values:
    """Return the values of LFM2; layers without KV heads are convolutions."""
    return {
        **_kv_heads(metadata, "conv"),
        "norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.get("shortconv.l_cache"),
        "conv_bias": metadata.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(metadata: GgufMetadata) -> Values:
    """Return the values of LFM2 with experts."""
    return {
        **lfm2(metadata),
        **experts(metadata, True),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "use_expert_bias": metadata.has("exp_probs_b.bias"),
    }


def _kv_heads(metadata: GgufMetadata, other: str) -> Values:
    """Return KV heads and layer types; layers without KV heads are of the ``other`` kind."""
    counts = metadata.each("attention.head_count_kv", num_layers(metadata))
    kinds = ["full_attention" if count else other for count in counts]
    return {"num_key_value_heads": max(counts, default=0), "layer_types": kinds}


def mamba(metadata: GgufMetadata) -> Values:
    """Return the values of Mamba 1."""
    return {
        **metadata.copied(MAMBA),
        "intermediate_size": metadata.get("ssm.inner_size"),
        "time_step_rank": metadata.get("ssm.time_step_rank"),
        "use_conv_bias": metadata.has("ssm_conv1d.bias"),
        "use_bias": metadata.has("ssm_in.bias"),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_rms_epsilon"),
        "head_dim": None,
        "num_attention_heads": None,
    }


def mamba2(metadata: GgufMetadata) -> Values:
    """Return the values of Mamba 2."""
    heads, channels = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.inner_size")
    return {
        **mamba(metadata),
        "num_heads": heads,
        "head_dim": channels // max(heads, 1),
        "n_groups": metadata.get("ssm.group_count"),
        "expand": channels / max(metadata.whole("embedding_length"), 1),
    }


def jamba(metadata: GgufMetadata) -> Values:
    """Return the values of Jamba."""
    attends = [bool(each) for each in metadata.each("attention.head_count_kv", num_layers(metadata))]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors for layer in range(num_layers(metadata))]
    return {
        **experts(metadata),
        "num_experts": metadata.get("expert_count") if any(routed) else 1,
        "num_key_value_heads": metadata.largest("attention.head_count_kv", 1),
        **_mamba_of_hybrid(metadata),
        "mamba_dt_rank": metadata.get("ssm.time_step_rank"),
        **_every(metadata, "attn_layer", attends),
        **_every(metadata, "expert_layer", routed),
    }


def _every(metadata: GgufMetadata, key: str, chosen: list[bool]) -> Values:
    """Return period and offset of the chosen layers; an offset after the last layer if none is chosen."""
    places = [layer for layer, each in enumerate(chosen) if each]
    count = len(chosen)
    period = places[1] - places[0] if len(places) > 1 else count + 1
    offset = places[0] if places else count
    if places != list(range(offset, count, period)) or offset >= period:
        raise metadata.wrong("attention.head_count_kv", "periodic: layers of one kind at equal distances")
    return {f"{key}_period": period, f"{key}_offset": offset}


def _mamba_of_hybrid(metadata: GgufMetadata) -> Values:
    return {
        **metadata.copied(MAMBA_OF_HYBRID),
        "mamba_expand": metadata.whole("ssm.inner_size") / max(metadata.whole("embedding_length"), 1),
        "mamba_conv_bias": metadata.has("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has("ssm_in.bias"),
    }


def _mamba2_of_hybrid(metadata: GgufMetadata) -> Values:
    heads = metadata.whole("ssm.time_step_rank")
    return {
        **_mamba_of_hybrid(metadata),
        "mamba_n_heads": heads,
        "mamba_d_head": metadata.whole("ssm.inner_size") // max(heads, 1),
        "mamba_n_groups": metadata.get("ssm.group_count"),
    }


def falcon_h1(metadata: GgufMetadata) -> Values:
    """Return the values of Falcon-H1; its factors are folded into the matrices."""
    return {
        **_mamba2_of_hybrid(metadata),
        "mamba_d_ssm": metadata.get("ssm.inner_size"),
        "mamba_rms_norm": metadata.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": metadata.has("ssm_out.bias"),
    }


def granite_hybrid(metadata: GgufMetadata) -> Values:
    """Return the values of Granite 4 with Mamba 2, and of Bamba, which uses RoPE."""
    dim = metadata.whole(
        "attention.key_length",
        metadata.whole("embedding_length") // metadata.largest("attention.head_count", 1),
    )
    shared = metadata.get("expert_shared_feed_forward_length") or metadata.get("feed_forward_length")
    return {
        **metadata.copied(GRANITE),
        **experts(metadata),
        **_mamba2_of_hybrid(metadata),
        **_kv_heads(metadata, "mamba"),
        "attention_multiplier": metadata.get("attention.scale") or max(dim, 1) ** -0.5,
        "num_local_experts": metadata.get("expert_count", 0),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", True) else "nope",
    }


def nemotron_h(metadata: GgufMetadata) -> Values:
    """Return the values of Nemotron-H: a layer is Mamba 2, attention or a feed-forward."""
    count = num_layers(metadata)
    kv_heads, widths = (
        metadata.each(key, count) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = [
        "mlp" if width else "attention" if shared else "mamba"
        for shared, width in zip(kv_heads, widths, strict=True)
    ]
    heads = metadata.whole("ssm.time_step_rank")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(kv_heads, default=0),
        "intermediate_size": max(widths, default=0) or None,
        "mamba_num_heads": heads,
        "mamba_head_dim": metadata.whole("ssm.inner_size") // max(heads, 1),
        **metadata.copied(NEMOTRON_H),
        "use_conv_bias": metadata.has("ssm_conv1d.bias"),
        "use_bias": metadata.has("ssm_in.bias"),
    }


def qwen3_next(metadata: GgufMetadata) -> Values:
    """Return the values of Qwen3-Next and Qwen 3.5."""
    count, heads = num_layers(metadata), metadata.whole("ssm.time_step_rank")
    linear = metadata.get("attention.recurrent_layers")
    period = max(metadata.whole("full_attention_interval", 4), 1)
    flags = linear[:count] if isinstance(linear, list) else [(i + 1) % period != 0 for i in range(count)]
    return {
        **experts(metadata, True),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.whole("ssm.inner_size") // max(heads, 1),
        **metadata.copied(DELTA),
        "layer_types": ["linear_attention" if each else "full_attention" for each in flags],
    }
