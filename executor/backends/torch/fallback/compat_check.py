"""Whether a model of transformers can run over paged KV memory: as much as can be told before its weights are read.

What a model keeps of the past must be keys and values that go through transformers' attention interface, of the sizes that the
card was understood to say, and what it computes of a token must depend on nothing else but the token and its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quintet.executor.backends.torch.fallback.attention import (
    NO_INTERFACE,
    AttentionCall,
    NotServed,
    PagedAttention,
)
from quintet.executor.backends.torch.fallback.checkpoint import Checkpoint
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.model_config.spec import KvNeed
from quintet.wire.errors import ConfigError

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers that keep keys and values, and nothing else, as cards name them."""

BY_LENGTH = {"dynamic", "longrope"}
"""Rotations that transformers computes for the longest sequence of a step."""


def examine(checkpoint: Checkpoint, path: str, needs: Sequence[KvNeed], max_model_len: int) -> None:
    """Raise `ConfigError` for a model that cannot be served, before anything is loaded."""
    config = checkpoint.config
    try:
        attention = PagedAttention(max_model_len)
        model = checkpoint.empty_model(attention.name)
        check_states(model, config.get_text_config(decoder=True))
        check_rotations(model, max_model_len)
        learnt = _learn(model, attention)
        if learnt is not None:
            check_calls(learnt, needs)
    except NotServed as why:
        raise refusal(path, config, why) from None


def refusal(path: str, config: PreTrainedConfig, why: NotServed) -> ConfigError:
    """Return the error that says why a model is not served."""
    name = (config.architectures or [type(config).__name__])[0]
    return ConfigError(f"{path}: {name} cannot run through transformers over paged KV memory: {why}")


def check_states(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise `NotServed` for layers that keep a state."""
    kinds = getattr(config, "layer_types", None) or []
    strange = sorted({str(kind) for kind in kinds} - ATTENDING)
    if strange:
        raise NotServed(f"its layers of the kind {', '.join(strange)} keep more than keys and values")
    if getattr(model, "_is_stateful", False):
        raise NotServed("its layers keep a recurrent state")


def check_rotations(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise `NotServed` where a rotation would depend on who else is in the step."""
    for module, kind in _rotations(model):
        if not any(word in kind for word in BY_LENGTH):
            continue
        original = getattr(module, "original_max_seq_len", None) or getattr(
            module, "max_seq_len_cached", None
        )
        parameters = getattr(module.config, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings") or original
        if isinstance(original, int) and max_model_len > original:
            raise NotServed(
                f"its rotation ({kind}) differs between short and long sequences, and would differ for all of a step; give"
                f" --max-model-len {original} or less"
            )


def _rotations(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str]]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            yield module, kinds
        elif isinstance(kinds, dict):
            yield from ((module, str(kind)) for kind in kinds.values())


def check_calls(calls: Sequence[AttentionCall], needs: Sequence[KvNeed]) -> None:
    """Raise `NotServed` where the model keeps other keys and values than memory is counted for."""
    if not calls:
        raise NotServed(NO_INTERFACE)
    if len(calls) != len(needs):
        raise NotServed(
            f"it attends {len(calls)} times, and its card was understood to have {len(needs)} layers"
        )
    for index, (call, need) in enumerate(zip(calls, needs, strict=True)):
        found = (call.num_kv_heads, call.key_dim, call.value_dim)
        counted = (need.num_kv_heads, need.key_dim, need.value_dim)
        if found != counted:
            raise NotServed(
                f"layer {index} has {found[0]} KV heads of {found[1]} and {found[2]} numbers, and its card was understood"
                f" to say {counted[0]} of {counted[1]} and {counted[2]}"
            )


def _learn(model: PreTrainedModel, attention: PagedAttention) -> Sequence[AttentionCall] | None:
    """Return what the layers want; None where the model looks into its activations, which are not there yet."""
    try:
        return TransformersModel(model, attention).calls
    except NotServed as why:
        if isinstance(why.__cause__, RuntimeError) and "meta" in str(why.__cause__):
            return None
        raise
