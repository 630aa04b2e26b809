"""Hints for flags of SGLang and llama.cpp, which are not accepted: each names Quintet's flag."""

from __future__ import annotations

SGLANG_FLAGS: dict[str, str] = {
    "model_path": "MODEL",
    "tokenizer_path": "--tokenizer",
    "context_length": "--max-model-len",
    "mem_fraction_static": "--gpu-memory-utilization",
    "max_total_tokens": "--kv-cache-memory",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--max-num-batched-tokens",
    "schedule_policy": "--scheduling-policy",
    "disable_radix_cache": "--no-enable-prefix-caching",
    "disable_cuda_graph": "--enforce-eager",
    "tp": "--tensor-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "pp_size": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "dp_size": "--data-parallel-size",
    "ep": "--enable-expert-parallel",
    "ep_size": "--enable-expert-parallel",
    "random_seed": "--seed",
    "lora_paths": "--lora-modules",
    **dict.fromkeys(
        (
            *("speculative_algorithm", "speculative_algo"),
            *(
                "speculative_draft_model_path",
                "speculative_draft_model",
                "speculative_draft_model_quantization",
            ),
            *("speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk"),
            *("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"),
        ),
        "--speculative-config",
    ),
}
"""Key of SGLang's flag -> Quintet's flag."""

LLAMA_CPP_FLAGS: dict[str, str] = {
    **dict.fromkeys(("m", "hf", "hf_repo"), "MODEL"),
    **dict.fromkeys(("c", "ctx_size"), "--max-model-len"),
    **dict.fromkeys(("np", "parallel"), "--max-num-seqs"),
    **dict.fromkeys(("b", "batch_size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("ngl", "n_gpu_layers", "gpu_layers"), "--device"),
    **dict.fromkeys(("a", "alias"), "--served-model-name"),
    **dict.fromkeys(("ctk", "cache_type_k", "ctv", "cache_type_v"), "--kv-cache-dtype"),
    **dict.fromkeys(("lora", "lora_scaled"), "--lora-modules"),
    **dict.fromkeys(
        (
            *("spec_type", "md", "model_draft", "hfd", "hfrd", "hf_repo_draft"),
            *("draft", "draft_n", "draft_max", "draft_n_min", "draft_min", "draft_p_min"),
            *("lcs", "lookup_cache_static", "lcd", "lookup_cache_dynamic"),
        ),
        "--speculative-config",
    ),
    "t": "--threads",
    "chat_template_file": "--chat-template",
    "reasoning_format": "--reasoning-parser",
}
"""Key of llama.cpp's flag -> Quintet's flag."""


def flag_for(name: str) -> str | None:
    """Return Quintet's flag for a flag or key of SGLang or llama.cpp; None for another name."""
    key = name.split("=", maxsplit=1)[0].lstrip("-").replace("-", "_")
    return SGLANG_FLAGS.get(key) or LLAMA_CPP_FLAGS.get(key)
