"""Tiny random models of every architecture that is read from GGUF, and files of them."""

from __future__ import annotations

from tests.models.random_checkpoints import Row, of_transformers
from tests.models.rows import dense, falcon, gemma, gpt, llama, routed, states

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = [1.0 + 0.1 * i for i in range(8)]

ROWS: dict[str, Row] = {
    "llama": of_transformers("LlamaConfig", rope_parameters=_LLAMA3, head_dim=32),
    "llama, tied": llama.ROWS["llama, one KV head, tied"],
    "llama of experts": routed.ROWS["mixtral"],
    "qwen2": llama.ROWS["qwen2"],
    "qwen3": llama.ROWS["qwen3"],
    "qwen2moe": of_transformers(
        "Qwen2MoeConfig", num_experts=9, shared_expert_intermediate_size=72, **routed.SMALL
    ),
    "qwen3moe": of_transformers("Qwen3MoeConfig", **routed.SMALL, num_experts=10, norm_topk_prob=True),
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
}
