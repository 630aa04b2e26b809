"""What models with states say in their own way in a GGUF file. Imports no torch."""

from __future__ import annotations

from quintet.executor.checkpoints.gguf.common_values import Values, num_layers
from quintet.executor.checkpoints.gguf.dense_values import granite
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata
from quintet.executor.checkpoints.gguf.routed_values import experts


def lfm2(said: GgufMetadata) -> Values:
    """LFM2: layers without KV heads are convolutions."""
    return {
        **_kv_heads(said, "conv"),
        "norm_eps": said.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": said.get("shortconv.l_cache"),
        "conv_bias": said.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(said: GgufMetadata) -> Values:
    """LFM2 with experts."""
    corrected = said.has("exp_probs_b.bias")
    dense = said.get("leading_dense_block_count", 0)
    return {**lfm2(said), **experts(said, True), "num_dense_layers": dense, "use_expert_bias": corrected}


def _kv_heads(said: GgufMetadata, other: str) -> Values:
    """Return what follows of the number of KV heads of each layer: those without any are of the ``other`` kind."""
    counts = said.each("attention.head_count_kv", num_layers(said))
    kinds = ["full_attention" if count else other for count in counts]
    return {"num_key_value_heads": max(counts, default=0), "layer_types": kinds}


def mamba_name(said: GgufMetadata) -> str:
    """Falcon Mamba's files have the name, too."""
    return "FalconMambaForCausalLM" if said.get("ssm.dt_b_c_rms") else "MambaForCausalLM"


def mamba(said: GgufMetadata) -> Values:
    """Mamba 1."""
    return {
        "state_size": said.get("ssm.state_size"),
        "conv_kernel": said.get("ssm.conv_kernel"),
        "intermediate_size": said.get("ssm.inner_size"),
        "time_step_rank": said.get("ssm.time_step_rank"),
        "use_conv_bias": said.has("ssm_conv1d.bias"),
        "use_bias": said.has("ssm_in.bias"),
        "layer_norm_epsilon": said.get("attention.layer_norm_rms_epsilon"),
        "head_dim": None,
        "num_attention_heads": None,
    }


def mamba2(said: GgufMetadata) -> Values:
    """Mamba 2."""
    heads, channels = said.whole("ssm.time_step_rank"), said.whole("ssm.inner_size")
    return {
        **mamba(said),
        "num_heads": heads,
        "head_dim": channels // max(heads, 1),
        "n_groups": said.get("ssm.group_count"),
        "expand": channels / max(said.whole("embedding_length"), 1),
    }


def jamba(said: GgufMetadata) -> Values:
    """Jamba."""
    attends = [bool(each) for each in said.each("attention.head_count_kv", num_layers(said))]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in range(num_layers(said))]
    return {
        **experts(said),
        "num_experts": said.get("expert_count") if any(routed) else 1,
        "num_key_value_heads": said.largest("attention.head_count_kv", 1),
        "mamba_expand": said.whole("ssm.inner_size") / max(said.whole("embedding_length"), 1),
        "mamba_d_state": said.get("ssm.state_size"),
        "mamba_d_conv": said.get("ssm.conv_kernel"),
        "mamba_dt_rank": said.get("ssm.time_step_rank"),
        "mamba_conv_bias": said.has("ssm_conv1d.bias"),
        "mamba_proj_bias": said.has("ssm_in.bias"),
        **_every(said, "attn_layer", attends),
        **_every(said, "expert_layer", routed),
    }


def _every(said: GgufMetadata, key: str, chosen: list[bool]) -> Values:
    """Return the period and the offset of the layers that are chosen; of none an offset behind the last layer."""
    places = [layer for layer, each in enumerate(chosen) if each]
    count = len(chosen)
    period = places[1] - places[0] if len(places) > 1 else count + 1
    offset = places[0] if places else count
    if places != list(range(offset, count, period)) or offset >= period:
        raise said.wrong("attention.head_count_kv", "such that layers of one kind recur after as many others")
    return {f"{key}_period": period, f"{key}_offset": offset}


def _mamba2_beside(said: GgufMetadata) -> Values:
    """Return what hybrids call the parts of Mamba 2."""
    heads, channels = said.whole("ssm.time_step_rank"), said.whole("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": channels // max(heads, 1),
        "mamba_n_groups": said.get("ssm.group_count"),
        "mamba_d_state": said.get("ssm.state_size"),
        "mamba_d_conv": said.get("ssm.conv_kernel"),
        "mamba_expand": channels / max(said.whole("embedding_length"), 1),
        "mamba_conv_bias": said.has("ssm_conv1d.bias"),
        "mamba_proj_bias": said.has("ssm_in.bias"),
    }


def falcon_h1(said: GgufMetadata) -> Values:
    """Falcon-H1, whose factors are those of its matrices."""
    normed = said.has("ssm_norm.weight")
    return {
        **_mamba2_beside(said),
        "mamba_d_ssm": said.get("ssm.inner_size"),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
        "projectors_bias": said.has("ssm_out.bias"),
    }


def granite_hybrid(said: GgufMetadata) -> Values:
    """Granite 4 with Mamba 2, and Bamba, which rotates."""
    dim = said.whole(
        "attention.key_length", said.whole("embedding_length") // said.largest("attention.head_count", 1)
    )
    rotated = said.get("rope.scaling.finetuned", True)
    shared = said.get("expert_shared_feed_forward_length") or said.get("feed_forward_length")
    return {
        **granite(said),
        **experts(said),
        **_mamba2_beside(said),
        **_kv_heads(said, "mamba"),
        "attention_multiplier": said.get("attention.scale") or max(dim, 1) ** -0.5,
        "num_local_experts": said.get("expert_count", 0),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotated else "nope",
    }


def nemotron_h(said: GgufMetadata) -> Values:
    """Nemotron-H: a layer is Mamba 2, attention or a feed-forward."""
    count = num_layers(said)
    kv_heads, widths = (said.each(key, count) for key in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        "mlp" if width else "attention" if shared else "mamba"
        for shared, width in zip(kv_heads, widths, strict=True)
    ]
    heads = said.whole("ssm.time_step_rank")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(kv_heads, default=0),
        "intermediate_size": max(widths, default=0) or None,
        "mamba_num_heads": heads,
        "mamba_head_dim": said.whole("ssm.inner_size") // max(heads, 1),
        "n_groups": said.get("ssm.group_count"),
        "ssm_state_size": said.get("ssm.state_size"),
        "conv_kernel": said.get("ssm.conv_kernel"),
        "use_conv_bias": said.has("ssm_conv1d.bias"),
        "use_bias": said.has("ssm_in.bias"),
    }


def qwen3_next(said: GgufMetadata) -> Values:
    """Qwen3-Next and Qwen 3.5."""
    count, heads = num_layers(said), said.whole("ssm.time_step_rank")
    linear = said.get("attention.recurrent_layers")
    period = max(said.whole("full_attention_interval", 4), 1)
    flags = linear[:count] if isinstance(linear, list) else [(i + 1) % period != 0 for i in range(count)]
    return {
        **experts(said, True),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": said.whole("ssm.inner_size") // max(heads, 1),
        "linear_num_key_heads": said.get("ssm.group_count"),
        "linear_key_head_dim": said.get("ssm.state_size"),
        "linear_conv_kernel_dim": said.get("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in flags],
    }
