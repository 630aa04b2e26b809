"""End-of-sequence ids and sampling defaults of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.deploy.config.gguf.tokenizer import tokens_of
from quintet.executor.checkpoints.gguf.header import Value
from quintet.executor.checkpoints.gguf.parts import Parts

_ENDING_KEYS = ("eos", "eot", "eom")
_ENDINGS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Tokens that llama.cpp treats as end of generation: files name one of them, chat templates may use others."""
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def generation_of_gguf(parts: Parts) -> dict[str, object]:
    """Return the equivalent of ``generation_config.json``. Raises `ConfigError`."""
    sampling = {ours: parts.metadata.get(theirs) for theirs, ours in _SAMPLING.items()}
    found = {key: value for key, value in sampling.items() if isinstance(value, int | float)}
    return {**found, "eos_token_id": _ending_ids(parts.metadata, tokens_of(parts))}


def _ending_ids(metadata: Mapping[str, Value], tokens: Sequence[str]) -> list[int]:
    """Return the ids that end a response, ``eos`` first."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDING_KEYS]
    ids = [each for each in named if type(each) is int and 0 <= each < len(tokens)]
    found = {token: index for index, token in enumerate(tokens) if token in _ENDINGS}
    if "<|end|>" in found and "<|return|>" in found:
        del found["<|end|>"]  # ends a message in gpt-oss, but a response has several messages
    return list(dict.fromkeys([*ids, *sorted(found.values())]))
