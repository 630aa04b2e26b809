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
    return said.whole("block_count") - said.whole("nextn_predict_layers", 0)


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
    heads, hidden = said.whole("attention.head_count"), said.whole("embedding_length")
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
}
"""By ``general.architecture``."""
