"""Checks, before weights are read, that a model of transformers can run over paged KV memory.

Requirements: all state of the past is keys and values that pass through transformers' attention interface; their sizes match our
reading of the config; the rest of the computation depends only on a token and its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quintet.executor.backends.torch.fallback.attention import (
    NO_INTERFACE,
    AttentionCall,
    PagedAttention,
    UnsupportedModel,
)
from quintet.executor.backends.torch.fallback.checkpoint import Checkpoint
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.model_config.spec import KvNeed
from quintet.wire.errors import ConfigError

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Layer types of configs with no state other than keys and values."""

BY_LENGTH = {"dynamic", "longrope"}
"""RoPE types that transformers computes for the longest sequence of a step."""


def check_compat(checkpoint: Checkpoint, path: str, needs: Sequence[KvNeed], max_model_len: int) -> None:
    """Raise `ConfigError` for an unsupported model, before anything is loaded."""
    config = checkpoint.config
    try:
        attention = PagedAttention(max_model_len)
        model = checkpoint.empty_model(attention.name)
        check_states(model, config.get_text_config(decoder=True))
        check_rotations(model, max_model_len)
        calls = _record_calls(model, attention)
        if calls is not None:
            check_calls(calls, needs)
    except UnsupportedModel as why:
        raise refusal(path, config, why) from None


def refusal(path: str, config: PreTrainedConfig, why: UnsupportedModel) -> ConfigError:
    """Return the error for an unsupported model."""
    name = (config.architectures or [type(config).__name__])[0]
    return ConfigError(f"{path}: {name} cannot run through transformers over paged KV memory: {why}")


def check_states(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` for layers with other state than keys and values."""
    kinds = getattr(config, "layer_types", None) or []
    unsupported = sorted({str(kind) for kind in kinds} - ATTENDING)
    if unsupported:
        raise UnsupportedModel(
            f"its layers of type {', '.join(unsupported)} have state other than keys and values"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel("its layers have a recurrent state")


def check_rotations(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise `UnsupportedModel` if a rotation would depend on other requests of a step."""
    for module, kind in _rotations(model):
        if not any(word in kind for word in BY_LENGTH):
            continue
        original = getattr(module, "original_max_seq_len", None) or getattr(
            module, "max_seq_len_cached", None
        )
        parameters = getattr(module.config, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings") or original
        if isinstance(original, int) and max_model_len > original:
            raise UnsupportedModel(
                f"its RoPE ({kind}) depends on the sequence length, and transformers uses one length per step; set"
                f" --max-model-len to {original} or less"
            )


def _rotations(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str]]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            yield module, kinds
        elif isinstance(kinds, dict):
            yield from ((module, str(kind)) for kind in kinds.values())


def check_calls(calls: Sequence[AttentionCall], needs: Sequence[KvNeed]) -> None:
    """Raise `UnsupportedModel` if the model's keys and values differ from the memory planned for them."""
    if not calls:
        raise UnsupportedModel(NO_INTERFACE)
    if len(calls) != len(needs):
        raise UnsupportedModel(
            f"it makes {len(calls)} attention calls, but its config implies {len(needs)} layers"
        )
    for index, (call, need) in enumerate(zip(calls, needs, strict=True)):
        actual = (call.num_kv_heads, call.key_dim, call.value_dim)
        planned = (need.num_kv_heads, need.key_dim, need.value_dim)
        if actual != planned:
            raise UnsupportedModel(
                f"layer {index} has {actual[0]} KV heads of dimensions {actual[1]} and {actual[2]}, but its config implies"
                f" {planned[0]} of {planned[1]} and {planned[2]}"
            )


def _record_calls(model: PreTrainedModel, attention: PagedAttention) -> Sequence[AttentionCall] | None:
    """Return the attention calls; None if the model reads activations, which do not exist on the meta device."""
    try:
        return TransformersModel(model, attention).calls
    except UnsupportedModel as why:
        if isinstance(why.__cause__, RuntimeError) and "meta" in str(why.__cause__):
            return None
        raise
