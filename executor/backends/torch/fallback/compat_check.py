"""Checks that a model of transformers can run over paged KV memory: before weights are read, and a self-check at startup.

Requirements: all state of the past is keys and values that pass through transformers' attention interface; their sizes match our
reading of the config; the rest of the computation depends only on a token and its position.

The checks before loading only cover the attention calls. The self-check verifies the rest: positions are used, no layer has other
state, and tokens of other rows have no influence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quintet.executor.backends.torch.fallback.attention import (
    NO_INTERFACE,
    PagedAttention,
    UnsupportedModel,
)
from quintet.executor.backends.torch.fallback.checkpoint import Checkpoint
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.runner import Runner
from quintet.executor.sequences import SequencePart, place, plan_of_parts
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.config import ModelConfig
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


def check_calls(calls: Sequence[AttentionLayer], needs: Sequence[KvNeed]) -> None:
    """Raise `UnsupportedModel` if the model's keys and values differ from the memory planned for them."""
    if not calls:
        raise UnsupportedModel(NO_INTERFACE)
    if len(calls) != len(needs):
        raise UnsupportedModel(
            f"it makes {len(calls)} attention calls, but its config implies {len(needs)} layers"
        )
    for index, (call, need) in enumerate(zip(calls, needs, strict=True)):
        actual = (call.num_kv_heads, call.head_dim, call.value_width)
        planned = (need.num_kv_heads, need.key_dim, need.value_dim)
        if actual != planned:
            raise UnsupportedModel(
                f"layer {index} has {actual[0]} KV heads of dimensions {actual[1]} and {actual[2]}, but its config implies"
                f" {planned[0]} of {planned[1]} and {planned[2]}"
            )


def _record_calls(model: PreTrainedModel, attention: PagedAttention) -> Sequence[AttentionLayer] | None:
    """Return the attention calls; None if the model reads activations, which do not exist on the meta device."""
    try:
        return TransformersModel(model, attention).attentions
    except UnsupportedModel as why:
        if isinstance(why.__cause__, RuntimeError) and "meta" in str(why.__cause__):
            return None
        raise


LENGTHS = (21, 13)
"""Sequence lengths. The first sequence is computed in two steps, the second in one step with its first part."""

MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Limit of the median token's error, relative to the spread of its logits. Rounding stays below it; a wrong position or mask
causes an error of about 1 in every token. The median tolerates ties between experts."""


class SelfCheck:
    """Two sequences, batched and in chunks over paged memory: their logits must match transformers' own attention."""

    def __init__(self, model: TransformersModel, config: ModelConfig, device: torch.device) -> None:
        """Compute the expected logits. Raises `UnsupportedModel` if their width differs from the config's vocabulary size."""
        generator = torch.Generator().manual_seed(0)
        self._config = config
        self._sequences = [
            torch.randint(config.vocab_size, (min(length, config.max_model_len),), generator=generator)
            for length in LENGTHS
        ]
        with torch.inference_mode():
            self._expected = [model.whole_logits(tokens.to(device)) for tokens in self._sequences]
        if self._expected[0].shape[1] != config.vocab_size:
            raise UnsupportedModel(
                f"it returns {self._expected[0].shape[1]} logits, but its config implies {config.vocab_size}"
            )

    def run(self, runner: Runner, tables: SlotTables, num_blocks: int) -> None:
        """Raise `UnsupportedModel` if steps over paged memory give other logits. The tables must have no active slot."""
        num_groups, num_slots, _ = tables.block_table.shape
        lengths = [len(tokens) for tokens in self._sequences]
        width = -(-max(lengths) // self._config.kv.block_size)
        lengths = lengths[: min(num_slots, num_blocks // (width * num_groups))]
        if not lengths:
            return
        for slot, tokens in enumerate(self._sequences[: len(lengths)]):
            place(tables, slot, tokens, width)
        part = lengths[0] // 3
        first: list[SequencePart] = [(0, 0, part)] + [(i, 0, n) for i, n in enumerate(lengths) if i]
        with torch.inference_mode():
            for pieces in (first, [(0, part, lengths[0] - part)]):
                _compare(runner, tables, pieces, self._expected)


def _compare(
    runner: Runner, tables: SlotTables, pieces: Sequence[SequencePart], expected: Sequence[torch.Tensor]
) -> None:
    """Compute one step and compare all its tokens."""
    runner.forward(Rows(plan_of_parts(pieces, draws=True)), tables)
    actual = runner.logits(np.arange(sum(count for _, _, count in pieces))).float()
    target = torch.cat([expected[i][start : start + count] for i, start, count in pieces]).float()
    errors = (actual - target).norm(dim=1) / (target - target.mean(1, keepdim=True)).norm(dim=1)
    dtype = expected[0].dtype
    if not float(errors.median()) < MAX_ERROR.get(dtype, MAX_ERROR[torch.bfloat16]):
        raise UnsupportedModel(
            f"the self-check failed: logits differ by {float(errors.median()):.2g} of their spread: its layers have state"
            " other than keys and values, or ignore positions"
        )
