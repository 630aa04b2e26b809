"""Generator of docs/vllm-flags.md from the flag tables: ``python -m tests.deploy.config.documented_flags`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quintet.deploy.config import vllm_flags as flags
from quintet.deploy.config.flag import option as spelling

PAGE = Path(__file__).parents[3] / "docs" / "vllm-flags.md"
_HEAD = """# Flags of vLLM

`quintet serve` accepts command lines written for `vllm serve`, and their keys in YAML files and arguments of `LLM`. This page
lists each flag of vLLM 0.33 and of older versions.

* A switch also has a `--no-` form, and may have a value: `--enforce-eager=true`.
* Names may have underscores. They may be abbreviated if no other flag begins so: `--gpu-memory-util 0.9`.
* JSON values may be given by key: `--speculative-config.method ngram`. `--model` is MODEL.
* A flag and its value may be one word, as in lists of compose files (`- --dtype auto`).
* Flags of SGLang and llama.cpp (`--model-path`, `--tp`, `-ngl`, …) are rejected; the error names the flag of Quintet.

* *taken*: the flag works, possibly under another name.
* *accepted*: the flag has no effect; a log line says so.
* *refused*: the flag would change behaviour, but is not supported; the error names an alternative. Values equal to the fixed
  behaviour (`0`, `1`, `none`, `auto`, `false`, `generate`, `raw_logprobs`) are accepted.

| Short form | Flag |
|---|---|
{short}

Token counts may be written as `8k` (8000), `8K` (8192) or `auto`; `--dtype half` is `float16`.
`None` as a value keeps a flag's default.
Names of attention backends of vLLM, such as `FLASH_ATTN`, have no effect.

| Flag | Effect |
|---|---|
"""

TAKEN = (
    "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "api_key", "attention_backend",
    "block_size", "chat_template", "chat_template_content_format", "data_parallel_size",
    "decode_context_parallel_size", "default_chat_template_kwargs", "device", "disable_fastapi_docs",
    "distributed_executor_backend", "dtype",
    "enable_auto_tool_choice", "enable_chunked_prefill", "enable_eplb", "enable_expert_parallel",
    "enable_force_include_usage", "enable_prefix_caching", "enable_prompt_embeds", "enable_tokenizer_info_endpoint",
    "enforce_eager", "eplb_config", "generation_config", "gpu_memory_utilization", "headless", "hf_overrides", "host",
    "kv_cache_dtype", "kv_events_config", "kv_transfer_config", "load_format", "long_prefill_token_threshold",
    "master_addr", "master_port", "max_logprobs", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "middleware", "model_impl", "nnodes", "node_rank", "override_generation_config",
    "per_request_spec_decode_metrics", "pipeline_parallel_size", "port", "quantization", "reasoning_config", "reasoning_parser",
    "return_tokens_as_token_ids", "revision", "root_path", "scheduling_policy", "seed", "served_model_name",
    "speculative_config", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "swap_space", "tensor_parallel_size",
    "tokenizer", "tokenizer_revision", "tool_call_parser", "trust_remote_code", "trust_request_chat_template", "uds",
)  # fmt: skip
"""Flags with the same name in vLLM and Quintet."""


def rows() -> Iterator[tuple[str, str]]:
    """Yield every flag and its effect."""
    yield from ((key, "taken") for key in TAKEN)
    yield from (
        (key, f"taken as {'the opposite of ' if new.convert else ''}`{spelling(new.ours)}`")
        for key, new in flags.RENAMED.items()
    )
    yield from ((key, f"taken as the environment variable `{name}`") for key, name in flags.HUB.items())
    yield from ((key, "taken as a part of `--hf-overrides`") for key in flags.ROPE)
    yield from ((key, "taken as a part of `--speculative-config`") for key in flags.DRAFTS)
    for table, words in (
        (flags.ACCEPTED_SWITCHES, "accepted"),
        (flags.ACCEPTED_VALUES, "accepted"),
        (flags.REFUSED_SWITCHES, "refused"),
        (flags.REFUSED_VALUES, "refused"),
    ):
        yield from ((key, f"{words}: {why}") for key, why in table.items())


def page() -> str:
    """Return the whole page."""
    short = "\n".join(f"| `{word}` | `{spelling(key)}` |" for word, key in flags.SHORT.items())
    lines = [f"| `{spelling(key)}` | {effect} |" for key, effect in sorted(rows())]
    return _HEAD.format(short=short) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
