"""Every architecture that is read from GGUF: whose card it has, and what its file says in a way of its own. Imports no torch.

A row names the architecture of `quintet.executor.cards.registry` and adds what the common values lack. Values that llama.cpp
has in its code rather than in its files are here, too. Keys: docs/gguf.md of ggml-org/ggml and gguf-py's constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quintet.executor.gguf.said import Said

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a file of one architecture is read."""

    name: str | Callable[[Said], str]
    """The card's."""
    more: Callable[[Said], Values] = lambda said: {}
    neighbours: bool = False
    """Whether llama.cpp rotates neighbours: where the card's family rotates halves, rows of queries and keys are reordered."""

    def card(self, said: Said) -> Values:
        """Return the values of the card."""
        name = self.name if isinstance(self.name, str) else self.name(said)
        return {"architectures": [name], **_common(said), **self.more(said)}


def _common(said: Said) -> Values:
    """Return what most families call the same."""
    hidden, heads = said.whole("embedding_length"), max(said.whole("attention.head_count", 0), 1)
    dim = said.whole("attention.key_length", hidden // heads)
    eps = said.get("attention.layer_norm_epsilon", said.get("attention.layer_norm_rms_epsilon"))
    return {
        "vocab_size": said.rows("token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": said.get("feed_forward_length"),
        "num_hidden_layers": num_layers(said),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": said.get("context_length"),
        "rms_norm_eps": said.get("attention.layer_norm_rms_epsilon", eps),
        "layer_norm_eps": eps,
        "layer_norm_epsilon": eps,
        "norm_epsilon": eps,
        "rope_theta": said.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(said),
        "partial_rotary_factor": _share(said.whole("rope.dimension_count", dim), dim),
        "tie_word_embeddings": "output.weight" not in said.tensors,
        "attention_bias": said.has("attn_q.bias", "attn_qkv.bias"),
        "mlp_bias": said.has("ffn_up.bias"),
    }


def num_layers(said: Said) -> int:
    """Return how many layers there are, but for those behind them that predict further tokens."""
    count = said.whole("block_count") - said.whole("nextn_predict_layers", 0)
    if count < 1:
        raise said.wrong("block_count", "more than nextn_predict_layers")
    return count


def _share(count: int, dim: int) -> float:
    """Return the share of a head that is rotated, such that its product with the head's numbers is cut to the count."""
    share = count / max(dim, 1)
    return share if int(dim * share) == count else (count + 0.5) / max(dim, 1)


def _scaling(said: Said) -> Values | None:
    kind, factor = said.get("rope.scaling.type"), said.get("rope.scaling.factor")
    original = said.get("rope.scaling.original_context_length")
    if said.has("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": said.factors("rope_factors_short.weight"),
            "long_factor": said.factors("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": said.get("rope.scaling.attn_factor"),
        }
    if said.has("rope_freqs.weight"):
        return {"rope_type": "factors", "factors": said.factors("rope_freqs.weight")}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": said.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": said.get("rope.scaling.yarn_beta_slow"),
            "attention_factor": said.get("rope.scaling.yarn_attn_factor"),
        }
    if kind not in (None, "none"):
        raise said.wrong("rope.scaling.type", "none, linear or yarn")
    return None


def _experts(said: Said, renormalise: bool) -> Values:
    """``renormalise``: what llama.cpp does in this architecture where its file does not say."""
    return {
        "num_experts": said.get("expert_count"),
        "num_experts_per_tok": said.get("expert_used_count"),
        "moe_intermediate_size": said.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": said.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": said.get("expert_weights_norm", renormalise),
    }


def _llama_name(said: Said) -> str:
    return "MixtralForCausalLM" if said.get("expert_count") else "LlamaForCausalLM"


def _mixtral(said: Said) -> Values:
    return {
        "num_local_experts": said.get("expert_count"),
        "num_experts_per_tok": said.get("expert_used_count"),
    }


def _gemma_cap(said: Said) -> Values:
    heads, hidden = max(said.whole("attention.head_count"), 1), said.whole("embedding_length")
    largest = num_layers(said) == (46 if said.architecture == "gemma2" else 62)
    return {
        "query_pre_attn_scalar": hidden / heads if largest else said.get("attention.key_length"),
        "attn_logit_softcapping": said.get("attn_logit_softcapping"),
        "final_logit_softcapping": said.get("final_logit_softcapping"),
        "sliding_window": said.get("attention.sliding_window"),
    }


def _gemma2(said: Said) -> Values:
    return {**_gemma_cap(said), "tie_word_embeddings": True}


def _gemma3(said: Said) -> Values:
    pattern = said.get("attention.sliding_window_pattern", 6)
    local = said.get("rope.freq_base_swa", 10000.0)
    return {**_gemma2(said), "rope_local_base_freq": local, "sliding_window_pattern": pattern}


def _phi3(said: Said) -> Values:
    return {"sliding_window": said.get("attention.sliding_window") or None}


def _gpt2(said: Said) -> Values:
    return {
        "max_position_embeddings": said.rows("position_embd.weight"),
        "n_inner": said.get("feed_forward_length"),
    }


def _parallel(said: Said) -> Values:
    return {
        "use_parallel_residual": said.get("use_parallel_residual", True),
        "use_qkv_bias": said.has("attn_q.bias"),
        "qk_layernorm": said.has("attn_q_norm.weight"),
    }


def _falcon(said: Said) -> Values:
    heads, kv_heads = said.whole("attention.head_count"), said.whole("attention.head_count_kv", 1)
    both = said.has("attn_norm_2.weight")
    return {
        "new_decoder_architecture": both or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if both else 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": said.get("feed_forward_length"),
        "bias": said.has("attn_qkv.bias"),
    }


def _starcoder(said: Said) -> Values:
    return {**_gpt2(said), "multi_query": said.whole("attention.head_count_kv", 1) == 1}


def _cohere(said: Said) -> Values:
    return {
        "logit_scale": said.get("logit_scale"),
        "use_qk_norm": said.has("attn_q_norm.weight"),
        "sliding_window": said.get("attention.sliding_window"),
    }


def _granite(said: Said) -> Values:
    return {
        "attention_multiplier": said.get("attention.scale"),
        "embedding_multiplier": said.get("embedding_scale"),
        "residual_multiplier": said.get("residual_scale"),
        "logits_scaling": said.get("logit_scale"),
    }


def _minicpm(said: Said) -> Values:
    """Its files have the factors that its card derives from others."""
    return {
        "scale_emb": said.get("embedding_scale", 12.0),
        "scale_depth": said.real("residual_scale", 1.4 / num_layers(said) ** 0.5) * num_layers(said) ** 0.5,
        "dim_model_base": round(said.whole("embedding_length") / max(said.real("logit_scale", 1.0), 1e-6)),
    }


def _olmo2_name(said: Said) -> str:
    return "Olmo3ForCausalLM" if said.get("attention.sliding_window") else "Olmo2ForCausalLM"


def _slides(said: Said) -> Values:
    return {"sliding_window": said.get("attention.sliding_window")}


def _lfm2(said: Said) -> Values:
    """Layers without KV heads are convolutions."""
    kv_heads = said.each("attention.head_count_kv", num_layers(said))
    return {
        "num_key_value_heads": max(kv_heads, default=0),
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "norm_eps": said.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": said.get("shortconv.l_cache"),
        "conv_bias": said.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _mamba(said: Said) -> Values:
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


def _mamba2(said: Said) -> Values:
    heads, channels = said.whole("ssm.time_step_rank"), said.whole("ssm.inner_size")
    return {
        **_mamba(said),
        "num_heads": heads,
        "head_dim": channels // max(heads, 1),
        "n_groups": said.get("ssm.group_count"),
        "expand": channels / max(said.whole("embedding_length"), 1),
    }


ARCHITECTURES = {
    "llama": Architecture(_llama_name, _mixtral, neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", lambda said: _experts(said, False)),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", lambda said: _experts(said, True)),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3),
    "phi3": Architecture("Phi3ForCausalLM", _phi3),
    "gpt2": Architecture("GPT2LMHeadModel", _gpt2),
    "arcee": Architecture("ArceeForCausalLM", neighbours=True),
    "bloom": Architecture("BloomForCausalLM"),
    "cohere2": Architecture("Cohere2ForCausalLM", _cohere, neighbours=True),
    "command-r": Architecture("CohereForCausalLM", _cohere, neighbours=True),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM", lambda said: {"use_bias": said.has("attn_q.bias")}, neighbours=True
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", _slides),
    "falcon": Architecture("FalconForCausalLM", _falcon),
    "glm4": Architecture("Glm4ForCausalLM", neighbours=True),
    "gptneox": Architecture("GPTNeoXForCausalLM", _parallel),
    "granite": Architecture("GraniteForCausalLM", _granite, neighbours=True),
    "lfm2": Architecture("Lfm2ForCausalLM", _lfm2),
    "mamba": Architecture("MambaForCausalLM", _mamba),
    "mamba2": Architecture("Mamba2ForCausalLM", _mamba2),
    "minicpm": Architecture("MiniCPMForCausalLM", _minicpm, neighbours=True),
    "nemotron": Architecture("NemotronForCausalLM"),
    "olmo": Architecture(
        "OlmoForCausalLM", lambda said: {"clip_qkv": said.get("attention.clamp_kqv")}, neighbours=True
    ),
    "olmo2": Architecture(_olmo2_name, _slides),
    "olmoe": Architecture("OlmoeForCausalLM", lambda said: _experts(said, False)),
    "orion": Architecture("OrionForCausalLM"),
    "phi2": Architecture("PhiForCausalLM"),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", neighbours=True),
    "stablelm": Architecture("StableLmForCausalLM", _parallel),
    "starcoder": Architecture("GPTBigCodeForCausalLM", _starcoder),
    "starcoder2": Architecture("Starcoder2ForCausalLM", lambda said: {"use_bias": said.has("attn_q.bias")}),
}
"""By ``general.architecture``."""
