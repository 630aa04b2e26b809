"""Hints for SGLang's flags, which are not accepted: each names Quintet's flag."""

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
}
"""Key of SGLang's flag -> Quintet's flag."""


def flag_for(name: str) -> str | None:
    """Return Quintet's flag for a flag or key of SGLang; None for another name."""
    return SGLANG_FLAGS.get(name.split("=", maxsplit=1)[0].removeprefix("--").replace("-", "_"))
