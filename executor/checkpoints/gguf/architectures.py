"""Supported GGUF architectures: name of the config and architecture-specific values. Imports no torch.

A row names the architecture of `quintet.executor.model_config.registry` and adds values that the common ones lack,
also constants of llama.cpp's code. Keys: docs/gguf.md of ggml-org/ggml and gguf-py's constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.executor.checkpoints.gguf import attention_values as attention
from quintet.executor.checkpoints.gguf import state_values as state
from quintet.executor.checkpoints.gguf.common_values import GRANITE, Values, common, num_layers
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata


@dataclass(frozen=True, slots=True)
class Architecture:
    """Reader of a file of one architecture."""

    name: str | Callable[[GgufMetadata], str]
    """Architecture name of the config, or a function of the metadata."""
    more: Callable[[GgufMetadata], Values] = lambda metadata: {}
    interleaved_rope: bool = False
    """True: llama.cpp rotates adjacent pairs; if the config's family rotates halves, rows of queries and keys are
    reordered."""
    tiled: bool = False
    """True: value heads of the delta rule are interleaved over the key heads instead of grouped by key head."""

    def hf_config(self, metadata: GgufMetadata) -> Values:
        """Return the values of the config."""
        name = self.name if isinstance(self.name, str) else self.name(metadata)
        return {"architectures": [name], **common(metadata), **self.more(metadata)}


def _one_of(key: str, named: str, other: str) -> Callable[[GgufMetadata], str]:
    """Return a function for families that share a GGUF name: the first name if the file has the key, else the other."""
    return lambda metadata: f"{named if metadata.get(key) else other}ForCausalLM"


def _renormalised(metadata: GgufMetadata) -> Values:
    return attention.experts(metadata, True)


def _use_bias(metadata: GgufMetadata) -> Values:
    return {"use_bias": metadata.has("attn_q.bias")}


ARCHITECTURES = {
    "llama": Architecture(
        _one_of("expert_count", "Mixtral", "Llama"),
        lambda of: of.copied(
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        ),
        interleaved_rope=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", attention.experts),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _renormalised),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", attention.gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", attention.gemma3),
    "phi3": Architecture(
        "Phi3ForCausalLM", lambda of: {"sliding_window": of.get("attention.sliding_window") or None}
    ),
    "gpt2": Architecture("GPT2LMHeadModel", attention.gpt2),
    "gpt-oss": Architecture("GptOssForCausalLM", attention.gpt_oss),
    "deepseek2": Architecture(attention.deepseek2_name, attention.deepseek2),
    "apertus": Architecture("ApertusForCausalLM", attention.apertus),
    "arcee": Architecture("ArceeForCausalLM", interleaved_rope=True),
    "baichuan": Architecture("BaichuanForCausalLM", attention.baichuan, interleaved_rope=True),
    "bailingmoe": Architecture("BailingMoeForCausalLM", attention.bailing, interleaved_rope=True),
    "bailingmoe2": Architecture("BailingMoeV2ForCausalLM", attention.bailing),
    "bitnet": Architecture("BitNetForCausalLM", attention.bitnet),
    "bloom": Architecture("BloomForCausalLM"),
    "chatglm": Architecture("ChatGLMModel", attention.chatglm),
    "cohere2": Architecture("Cohere2ForCausalLM", attention.cohere, interleaved_rope=True),
    "command-r": Architecture("CohereForCausalLM", attention.cohere, interleaved_rope=True),
    "deci": Architecture("DeciLMForCausalLM", attention.deci, interleaved_rope=True),
    "deepseek": Architecture("DeepseekForCausalLM", attention.experts, interleaved_rope=True),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        lambda of: attention.experts(of) | {"layer_types": ["full_attention"] * num_layers(of)},
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _use_bias, interleaved_rope=True),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", attention.ernie),
    "exaone": Architecture("ExaoneForCausalLM"),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM", lambda of: attention.experts(of) | attention.slides(of)
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", attention.slides),
    "falcon": Architecture("FalconForCausalLM", attention.falcon),
    "falcon-h1": Architecture("FalconH1ForCausalLM", state.falcon_h1),
    "glm4": Architecture("Glm4ForCausalLM", interleaved_rope=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        lambda of: attention.experts(of) | {"use_qk_norm": of.has("attn_q_norm.weight")},
    ),
    "gptneox": Architecture("GPTNeoXForCausalLM", attention.parallel),
    "granite": Architecture("GraniteForCausalLM", lambda of: of.copied(GRANITE), interleaved_rope=True),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", state.granite_hybrid, interleaved_rope=True),
    "granitemoe": Architecture(  # also Granite 4 without Mamba and experts
        _one_of("expert_count", "GraniteMoeShared", "Granite"), attention.granite_moe, interleaved_rope=True
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", attention.hunyuan),
    "internlm2": Architecture(
        "InternLM2ForCausalLM", lambda of: {"bias": of.has("attn_q.bias")}, interleaved_rope=True
    ),
    "jais2": Architecture("Jais2ForCausalLM"),
    "jamba": Architecture("JambaForCausalLM", state.jamba),
    "lfm2": Architecture("Lfm2ForCausalLM", state.lfm2),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", state.lfm2_moe),
    "llama4": Architecture("Llama4ForCausalLM", attention.llama4, interleaved_rope=True),
    "mamba": Architecture(_one_of("ssm.dt_b_c_rms", "FalconMamba", "Mamba"), state.mamba),
    "mamba2": Architecture("Mamba2ForCausalLM", state.mamba2),
    "minicpm": Architecture("MiniCPMForCausalLM", attention.minicpm, interleaved_rope=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", attention.minicpm3),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", attention.minimax),
    "mistral3": Architecture("Ministral3ForCausalLM", attention.ministral3, interleaved_rope=True),
    "mpt": Architecture("MPTForCausalLM", attention.mpt),
    "nemotron": Architecture("NemotronForCausalLM"),
    "nemotron_h": Architecture("NemotronHForCausalLM", state.nemotron_h),
    "olmo": Architecture(
        "OlmoForCausalLM", lambda of: of.copied({"clip_qkv": "attention.clamp_kqv"}), interleaved_rope=True
    ),
    "olmo2": Architecture(_one_of("attention.sliding_window", "Olmo3", "Olmo2"), attention.slides),
    "olmoe": Architecture("OlmoeForCausalLM", attention.experts),
    "orion": Architecture("OrionForCausalLM"),
    "phi2": Architecture("PhiForCausalLM"),
    "phimoe": Architecture("PhimoeForCausalLM", attention.phi_moe),
    "qwen": Architecture(  # files lack its context extension
        "QWenLMHeadModel",
        lambda of: of.copied({"kv_channels": "attention.key_length", "seq_length": "context_length"}),
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen35": Architecture("Qwen3_5ForCausalLM", state.qwen3_next, tiled=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", state.qwen3_next, tiled=True),
    "qwen3next": Architecture("Qwen3NextForCausalLM", state.qwen3_next),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _renormalised),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved_rope=True),
    "stablelm": Architecture("StableLmForCausalLM", attention.parallel),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM",
        lambda of: attention.gpt2(of) | {"multi_query": of.whole("attention.head_count_kv", 1) == 1},
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _use_bias),
    "xverse": Architecture("XverseForCausalLM", interleaved_rope=True),
}
"""Keyed by ``general.architecture``."""
