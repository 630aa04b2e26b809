"""Configuration of speculative decoding (``--speculative-config``), in vLLM's format."""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.deploy.config.flags import Options
from quintet.wire.config import MAX_DRAFTS, SpeculativeConfig
from quintet.wire.errors import ConfigError

FLAG = "--speculative-config"
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
MAX_LOOKUP = 32
"""Maximum number of newest tokens that prompt lookup compares."""


class _SpeculativeJson(msgspec.Struct, forbid_unknown_fields=True):
    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


def speculative_config(
    options: Options, kind: Literal["torch", "mock"], device: Literal["cpu", "cuda"]
) -> SpeculativeConfig | None:
    """Return the section, or None without ``--speculative-config``. Raises `ConfigError`."""
    text = options.speculative_config
    if text is None:
        return None
    try:
        parsed = msgspec.json.decode(text, type=_SpeculativeJson)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{FLAG} {text}: {error}; write JSON such as {EXAMPLE}") from None
    if parsed.method != "ngram":
        raise ConfigError(
            f'{FLAG}: the method is "{parsed.method}"; only "ngram" (prompt lookup) is supported: write {EXAMPLE}, or drop'
            f" {FLAG}"
        )
    most, least = parsed.prompt_lookup_max, parsed.prompt_lookup_min
    if most is None and least is None:
        most, least = SpeculativeConfig().prompt_lookup_max, SpeculativeConfig().prompt_lookup_min
    most = least if most is None else most
    least = most if least is None else least
    assert most is not None and least is not None
    if not 1 <= parsed.num_speculative_tokens <= MAX_DRAFTS:
        raise ConfigError(
            f"{FLAG}: num_speculative_tokens is {parsed.num_speculative_tokens}; it must be 1 to {MAX_DRAFTS}"
        )
    if not 1 <= least <= most <= MAX_LOOKUP:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min is {least} and prompt_lookup_max {most}; they must be 1 to {MAX_LOOKUP}, in this order"
        )
    if kind == "mock" or device == "cuda":
        raise ConfigError(
            f"{FLAG} is only supported on the CPU (--device cpu), not on {'a mock' if kind == 'mock' else 'CUDA'}: drop it"
        )
    if options.model_impl == "transformers":
        raise ConfigError(f"{FLAG} is not supported with --model-impl transformers: drop one of them")
    if options.pipeline_parallel_size > 1:
        raise ConfigError(f"{FLAG} is not supported with --pipeline-parallel-size: drop one of them")
    return SpeculativeConfig(
        num_speculative_tokens=parsed.num_speculative_tokens, prompt_lookup_min=least, prompt_lookup_max=most
    )
