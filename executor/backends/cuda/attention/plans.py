"""Attention plans of a model: one per head configuration of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.rows import StepRows
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError


class AttentionPlans:
    """Owns the plans. Layers run in sequence on one stream, so all layers of a head configuration share a plan."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[AttentionLayer],
        config: EngineConfig,
        max_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        """Allocate for steps of up to ``max_tokens``. Raises `ConfigError` for an unsupported block size."""
        self._plans = {
            heads: AttentionPlan(
                device,
                config.scheduler.max_num_seqs,
                max_tokens,
                heads.num_heads,
                heads.num_kv_heads,
                heads.head_dim,
                config.model.max_model_len,
                dtype,
                kv_dtype,
                fixed_splits=config.executor.batch_invariant,
                value_dim=heads.value_width,
                attention_windows=tuple(
                    dict.fromkeys(layer.attention_window for layer in layers if layer.heads == heads)
                ),
            )
            for heads in dict.fromkeys(layer.heads for layer in layers)
        }
        block_size = config.model.kv.block_size
        if not all(plan.supports_block_size(block_size) for plan in self._plans.values()):
            raise ConfigError(
                f"the block size is {block_size} tokens, which the GPU kernels do not support for sequences of"
                f" {config.model.max_model_len} tokens: set --block-size 16, or another size of at least 2"
            )

    def of(self, layer: AttentionLayer) -> AttentionPlan:
        """Return the plan of a layer."""
        return self._plans[layer.heads]

    @property
    def only(self) -> AttentionPlan | None:
        """The plan, if all layers share one; None otherwise."""
        return next(iter(self._plans.values())) if len(self._plans) == 1 else None

    def prepare(self, rows: StepRows) -> None:
        for plan in self._plans.values():
            plan.prepare(rows)
