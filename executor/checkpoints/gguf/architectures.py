"""Every architecture that is read from GGUF: whose card it has, and what its file says in a way of its own. Imports no torch.

A row names the architecture of `quintet.executor.model_config.registry` and adds what the common values lack. Values
that llama.cpp has in its code rather than in its files are here, too. Keys: docs/gguf.md of ggml-org/ggml and
gguf-py's constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quintet.executor.checkpoints.gguf import dense_values as dense
from quintet.executor.checkpoints.gguf import routed_values as routed
from quintet.executor.checkpoints.gguf import state_values as state
from quintet.executor.checkpoints.gguf.common_values import Values, common
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a file of one architecture is read."""

    name: str | Callable[[GgufMetadata], str]
    """The card's."""
    more: Callable[[GgufMetadata], Values] = lambda said: {}
    neighbours: bool = False
    """Whether llama.cpp rotates neighbours: where the card's family rotates halves, rows of queries and keys are reordered."""
    tiled: bool = False
    """Whether heads of values take turns with those of keys, under the delta rule, rather than follow theirs."""

    def card(self, said: GgufMetadata) -> Values:
        """Return the values of the card."""
        name = self.name if isinstance(self.name, str) else self.name(said)
        return {"architectures": [name], **common(said), **self.more(said)}


def _renormalised(said: GgufMetadata) -> Values:
    return routed.experts(said, True)


def _use_bias(said: GgufMetadata) -> Values:
    return {"use_bias": said.has("attn_q.bias")}


ARCHITECTURES = {
    "llama": Architecture(routed.llama_name, routed.mixtral, neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", routed.experts),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _renormalised),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", dense.gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", dense.gemma3),
    "phi3": Architecture("Phi3ForCausalLM", dense.phi3),
    "gpt2": Architecture("GPT2LMHeadModel", dense.gpt2),
    "gpt-oss": Architecture("GptOssForCausalLM", routed.gpt_oss),
    "deepseek2": Architecture(routed.deepseek2_name, routed.deepseek2),
    "apertus": Architecture("ApertusForCausalLM", dense.apertus),
    "arcee": Architecture("ArceeForCausalLM", neighbours=True),
    "baichuan": Architecture("BaichuanForCausalLM", dense.baichuan, neighbours=True),
    "bailingmoe": Architecture("BailingMoeForCausalLM", routed.bailing, neighbours=True),
    "bailingmoe2": Architecture("BailingMoeV2ForCausalLM", routed.bailing),
    "bitnet": Architecture("BitNetForCausalLM", dense.bitnet),
    "bloom": Architecture("BloomForCausalLM"),
    "chatglm": Architecture("ChatGLMModel", dense.chatglm),
    "cohere2": Architecture("Cohere2ForCausalLM", dense.cohere, neighbours=True),
    "command-r": Architecture("CohereForCausalLM", dense.cohere, neighbours=True),
    "deci": Architecture("DeciLMForCausalLM", dense.deci, neighbours=True),
    "deepseek": Architecture("DeepseekForCausalLM", routed.experts, neighbours=True),
    "dots1": Architecture("Dots1ForCausalLM", routed.dots1),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _use_bias, neighbours=True),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", routed.ernie),
    "exaone": Architecture("ExaoneForCausalLM"),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", routed.exaone),
    "exaone4": Architecture("Exaone4ForCausalLM", dense.slides),
    "falcon": Architecture("FalconForCausalLM", dense.falcon),
    "falcon-h1": Architecture("FalconH1ForCausalLM", state.falcon_h1),
    "glm4": Architecture("Glm4ForCausalLM", neighbours=True),
    "glm4moe": Architecture("Glm4MoeForCausalLM", routed.glm4),
    "gptneox": Architecture("GPTNeoXForCausalLM", dense.parallel),
    "granite": Architecture("GraniteForCausalLM", dense.granite, neighbours=True),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", state.granite_hybrid, neighbours=True),
    "granitemoe": Architecture(routed.granite_name, routed.granite_moe, neighbours=True),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", routed.hunyuan),
    "internlm2": Architecture(
        "InternLM2ForCausalLM", lambda said: {"bias": said.has("attn_q.bias")}, neighbours=True
    ),
    "jais2": Architecture("Jais2ForCausalLM"),
    "jamba": Architecture("JambaForCausalLM", state.jamba),
    "lfm2": Architecture("Lfm2ForCausalLM", state.lfm2),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", state.lfm2_moe),
    "llama4": Architecture("Llama4ForCausalLM", routed.llama4, neighbours=True),
    "mamba": Architecture(state.mamba_name, state.mamba),
    "mamba2": Architecture("Mamba2ForCausalLM", state.mamba2),
    "minicpm": Architecture("MiniCPMForCausalLM", dense.minicpm, neighbours=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", routed.minicpm3),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", routed.minimax),
    "mistral3": Architecture("Ministral3ForCausalLM", dense.ministral3, neighbours=True),
    "mpt": Architecture("MPTForCausalLM", dense.mpt),
    "nemotron": Architecture("NemotronForCausalLM"),
    "nemotron_h": Architecture("NemotronHForCausalLM", state.nemotron_h),
    "olmo": Architecture(
        "OlmoForCausalLM", lambda said: {"clip_qkv": said.get("attention.clamp_kqv")}, neighbours=True
    ),
    "olmo2": Architecture(dense.olmo2_name, dense.slides),
    "olmoe": Architecture("OlmoeForCausalLM", routed.experts),
    "orion": Architecture("OrionForCausalLM"),
    "phi2": Architecture("PhiForCausalLM"),
    "phimoe": Architecture("PhimoeForCausalLM", routed.phi_moe),
    "qwen": Architecture("QWenLMHeadModel", dense.qwen1),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen35": Architecture("Qwen3_5ForCausalLM", state.qwen3_next, tiled=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", state.qwen3_next, tiled=True),
    "qwen3next": Architecture("Qwen3NextForCausalLM", state.qwen3_next),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _renormalised),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", neighbours=True),
    "stablelm": Architecture("StableLmForCausalLM", dense.parallel),
    "starcoder": Architecture("GPTBigCodeForCausalLM", dense.starcoder),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _use_bias),
    "xverse": Architecture("XverseForCausalLM", neighbours=True),
}
"""By ``general.architecture``."""
