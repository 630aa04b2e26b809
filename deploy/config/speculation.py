"""Configuration of speculative decoding (``--speculative-config``), in vLLM's format."""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.deploy.config.flags import Options
from quintet.wire.config import MAX_DRAFTS, DraftModelConfig, SpeculativeConfig
from quintet.wire.errors import ConfigError

FLAG = "--speculative-config"
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
MAX_LOOKUP = 32
"""Maximum number of newest tokens that prompt lookup compares."""

METHODS = ("ngram", "draft_model")


class _SpeculativeJson(msgspec.Struct, forbid_unknown_fields=True):
    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


def speculative_config(
    options: Options,
    kind: Literal["torch", "mock"],
    device: Literal["cpu", "cuda"],
    draft: DraftModelConfig | None = None,
) -> SpeculativeConfig | None:
    """Return the section, or None without ``--speculative-config``. draft: its draft model. Raises `ConfigError`."""
    parsed = _parsed(options)
    if parsed is None:
        return None
    check_support(options, kind, device)
    if not 1 <= parsed.num_speculative_tokens <= MAX_DRAFTS:
        raise ConfigError(
            f"{FLAG}: num_speculative_tokens is {parsed.num_speculative_tokens}; it must be 1 to {MAX_DRAFTS}"
        )
    least, most = _lookup_range(parsed)
    return SpeculativeConfig(
        method="ngram" if parsed.model is None else "draft_model",
        num_speculative_tokens=parsed.num_speculative_tokens,
        prompt_lookup_min=least,
        prompt_lookup_max=most,
        draft=draft,
    )


def draft_model_name(options: Options) -> str | None:
    """Return the name or path of the draft model, or None without one. Raises `ConfigError`."""
    parsed = _parsed(options)
    return None if parsed is None else parsed.model


def _parsed(options: Options) -> _SpeculativeJson | None:
    """Return the flag's value, with the keys of its method only."""
    text = options.speculative_config
    if text is None:
        return None
    try:
        parsed = msgspec.json.decode(text, type=_SpeculativeJson)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{FLAG} {text}: {error}; write JSON such as {EXAMPLE}") from None
    method = parsed.method or ("ngram" if parsed.model is None else "draft_model")
    if method not in METHODS:
        raise ConfigError(
            f'{FLAG}: the method is "{method}"; it must be one of {", ".join(METHODS)}: write {EXAMPLE}, or drop {FLAG}'
        )
    if method == "draft_model" and parsed.model is None:
        raise ConfigError(f"{FLAG}: the method draft_model needs the key model, a folder or name of a model")
    if method != "draft_model" and parsed.model is not None:
        raise ConfigError(f"{FLAG}: the key model is only for the method draft_model: drop model or method")
    if method != "ngram" and (parsed.prompt_lookup_min, parsed.prompt_lookup_max) != (None, None):
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min and prompt_lookup_max are only for the method ngram: drop them"
        )
    return parsed


def _lookup_range(parsed: _SpeculativeJson) -> tuple[int, int]:
    most, least = parsed.prompt_lookup_max, parsed.prompt_lookup_min
    if most is None and least is None:
        most, least = SpeculativeConfig().prompt_lookup_max, SpeculativeConfig().prompt_lookup_min
    most = least if most is None else most
    least = most if least is None else least
    assert most is not None and least is not None
    if not 1 <= least <= most <= MAX_LOOKUP:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min is {least} and prompt_lookup_max {most}; they must be 1 to {MAX_LOOKUP}, in this order"
        )
    return least, most


def check_support(options: Options, kind: Literal["torch", "mock"], device: Literal["cpu", "cuda"]) -> None:
    """Reject devices and layouts without speculative decoding."""
    if options.speculative_config is None:
        return
    if kind == "mock" or device == "cuda":
        raise ConfigError(
            f"{FLAG} is only supported on the CPU (--device cpu), not on {'a mock' if kind == 'mock' else 'CUDA'}: drop it"
        )
    if options.model_impl == "transformers":
        raise ConfigError(f"{FLAG} is not supported with --model-impl transformers: drop one of them")
    if options.pipeline_parallel_size > 1:
        raise ConfigError(f"{FLAG} is not supported with --pipeline-parallel-size: drop one of them")
    if options.tensor_parallel_size > 1 and draft_model_name(options) is not None:
        raise ConfigError(
            f"{FLAG}: a draft model is not supported with --tensor-parallel-size: drop one of them, or use the method ngram"
        )
