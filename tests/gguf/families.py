"""Tiny random models of every supported GGUF architecture, and their files."""

from __future__ import annotations

from tests.models.checkpoints.renamed import renamed
from tests.models.random_checkpoints import Row, of_module, of_transformers
from tests.models.references.baichuan import Baichuan
from tests.models.references.internlm2 import InternLM2
from tests.models.references.qwen1 import Qwen1
from tests.models.rows import dense, falcon, gemma, gpt, latent, llama, moe, remote_code, states

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = latent.YARN | {"mscale": 0.8}
_GPT_OSS = moe.GPT_OSS | {"swiglu_limit": 7.0}
_DELTA = states.QWEN_NEXT | {"linear_value_head_dim": 16}
_DELTA_DENSE = states.QWEN_DENSE | {"linear_value_head_dim": 16}
_LONG = [1.0 + 0.1 * i for i in range(8)]

ROWS: dict[str, Row] = {
    "llama": of_transformers("LlamaConfig", rope_parameters=_LLAMA3, head_dim=32),
    "llama, tied": llama.ROWS["llama, one KV head, tied"],
    "llama of experts": moe.ROWS["mixtral"],
    "qwen2": llama.ROWS["qwen2"],
    "qwen3": llama.ROWS["qwen3"],
    "qwen2moe": of_transformers(
        "Qwen2MoeConfig", num_experts=9, shared_expert_intermediate_size=72, **moe.SMALL
    ),
    "qwen3moe": of_transformers("Qwen3MoeConfig", **moe.SMALL, num_experts=10, norm_topk_prob=True),
    "gemma": gemma.ROWS["gemma"],
    "gemma2": of_transformers(
        "Gemma2Config",
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=11,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": of_transformers(
        "Gemma3TextConfig", head_dim=32, query_pre_attn_scalar=32, sliding_window=11, num_hidden_layers=7
    ),
    "phi3": dense.ROWS["phi3"],
    "phi3, window": of_transformers(
        "Phi3Config", sliding_window=11, pad_token_id=0, original_max_position_embeddings=256
    ),
    "gpt2": gpt.ROWS["gpt2"],
    "apertus": dense.ROWS["apertus"],
    "arcee": of_transformers("ArceeConfig"),
    "bloom": falcon.ROWS["bloom"],
    "cohere2": dense.ROWS["cohere2"],
    "command-r": dense.ROWS["cohere"],
    "command-r, normed queries": of_transformers("CohereConfig", use_qk_norm=True),
    "ernie4_5": dense.ROWS["ernie 4.5"],
    "exaone4": dense.ROWS["exaone4, nothing slides"],
    "exaone4, some layers slide": dense.ROWS["exaone4"],
    "falcon 7b": falcon.ROWS["falcon 7b"],
    "falcon 40b": falcon.ROWS["falcon 40b"],
    "falcon 11b": falcon.ROWS["falcon 11b"],
    "glm4": dense.ROWS["glm4"],
    "gptneox": gpt.ROWS["gpt_neox"],
    "granite": dense.ROWS["granite"],
    "lfm2": states.ROWS["lfm2"],
    "mamba": of_transformers("MambaConfig", intermediate_size=128),
    "mamba2": states.ROWS["mamba2"],
    "nemotron": dense.ROWS["nemotron"],
    "olmo": dense.ROWS["olmo"],
    "olmo2": dense.ROWS["olmo2"],
    "olmo3": dense.ROWS["olmo3"],
    "olmoe": of_transformers(
        "OlmoeConfig", num_experts=8, num_experts_per_tok=3, num_key_value_heads=4, pad_token_id=0
    ),
    "phi2": dense.ROWS["phi"],
    "seed_oss": dense.ROWS["seed-oss"],
    "smollm3": dense.ROWS["smollm3"],
    "stablelm": dense.ROWS["stablelm"],
    "stablelm, side by side": dense.ROWS["stablelm, side by side"],
    "starcoder": gpt.ROWS["gpt_bigcode"],
    "starcoder2": of_transformers("Starcoder2Config", sliding_window=None),
    "baichuan": remote_code.ROWS["baichuan 7b"],
    "baichuan, 13b": of_module(
        remote_code.HF_CONFIG_13B | {"hidden_size": 80, "num_attention_heads": 5, "num_hidden_layers": 40},
        Baichuan,
    ),
    "bailingmoe": moe.ROWS["granite moe, as ling"],
    "bailingmoe2": moe.ROWS["glm4 moe, as ling 2"],
    "chatglm": remote_code.ROWS["chatglm"],
    "deci": llama.ROWS["nemotron nas"],
    "deepseek": moe.ROWS["granite moe, as deepseek 1"],
    "deepseek2": of_transformers("DeepseekV3Config", **latent.SMALL, **latent.ROUTED, rope_parameters=_YARN),
    "deepseek2, softmax": latent.ROWS["deepseek v2, queries at once"],
    "deepseek2, softmax, groups": of_transformers(
        "DeepseekV2Config",
        **latent.SMALL,
        **latent.ROUTED,
        topk_method="group_limited_greedy",
        rope_parameters=_YARN,
    ),
    "deepseek2, as glm 4.7 flash": latent.ROWS["deepseek v3, as glm 4.7 flash"],
    "deepseek2, no experts": latent.ROWS["deepseek v3, as youtu"],
    "dots1": of_transformers(
        "Dots1Config",
        **moe.SMALL,
        num_key_value_heads=4,
        n_routed_experts=12,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        sliding_window=None,
    ),
    "ernie4_5-moe": of_transformers(
        "Ernie4_5_MoeConfig", moe_num_experts=9, moe_k=3, moe_intermediate_size=40
    ),
    "exaone": remote_code.ROWS["exaone 3"],
    "exaone-moe": moe.ROWS["glm4 moe, as exaone"],
    "falcon-h1": states.ROWS["falcon h1"],
    "falcon-h1, normed": states.ROWS["falcon h1, normed"],
    "glm4moe": moe.ROWS["glm4 moe"],
    "gpt-oss": of_transformers("GptOssConfig", **_GPT_OSS),
    "gpt-oss, not stretched": of_transformers(
        "GptOssConfig", **_GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 150000.0}
    ),
    "granitehybrid": states.ROWS["granite hybrid"],
    "granitehybrid, experts": states.ROWS["granite hybrid, experts"],
    "granitehybrid, positions": states.ROWS["granite hybrid, positions"],
    "granitemoe": moe.ROWS["granite moe"],
    "granitemoe, shared expert": moe.ROWS["granite moe, shared expert"],
    "hunyuan-dense": dense.ROWS["hunyuan"],
    "hunyuan-moe": moe.ROWS["hunyuan moe"],
    "internlm2": of_module(remote_code.INTERNLM2 | {"rope_scaling": None}, InternLM2),
    "jais2": dense.ROWS["jais 2"],
    "jamba": of_transformers(
        "JambaConfig", num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1
    ),
    "jamba, experts": states.ROWS["jamba, experts"],
    "lfm2moe": of_transformers(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        num_dense_layers=1,
    ),
    "llama4": of_transformers(
        "Llama4TextConfig", **(moe.LLAMA4 | {"attention_chunk_size": 8192, "floor_scale": 8192})
    ),
    "mamba, of falcon": of_transformers("FalconMambaConfig", intermediate_size=128),
    "minicpm": dense.ROWS["minicpm"],
    "minicpm3": of_transformers(
        "MiniCPM3Config",
        **latent.SMALL | {"v_head_dim": 16},
        scale_depth=1.4,
        scale_emb=12,
        dim_model_base=256,
        tie_word_embeddings=False,
    ),
    "minimax-m2": moe.ROWS["minimax m2"],
    "mistral3": dense.ROWS["ministral 3"],
    "mpt": falcon.ROWS["mpt"] if "mpt" in falcon.ROWS else dense.ROWS["mpt"],
    "nemotron_h": states.ROWS["nemotron h"],
    "orion": dense.ROWS["orion"],
    "phimoe": of_transformers("PhimoeConfig", num_local_experts=6, lm_head_bias=True, attention_bias=True),
    "qwen": of_module(remote_code.QWEN_1 | {"seq_length": 512}, Qwen1),
    "qwen35": of_transformers(
        "Qwen3_5TextConfig", **_DELTA_DENSE, **states.QWEN_TWO, rope_parameters=states.MROPE
    ),
    "qwen35moe": of_transformers(
        "Qwen3_5MoeTextConfig",
        **_DELTA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=states.MROPE,
    ),
    "qwen3next": of_transformers("Qwen3NextConfig", **_DELTA, num_hidden_layers=4),
    "xverse": renamed(of_transformers("LlamaConfig"), {"architectures": ["XverseForCausalLM"]}),
}
