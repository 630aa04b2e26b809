"""The attention plans of a model: one for each kind of heads that its layers have, and none where no layer attends."""

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
    """Owns them. Layers are computed one after the other on one stream, so each plan serves all layers of its kind."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[AttentionLayer],
        config: EngineConfig,
        max_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        """Allocate for steps of up to so many tokens. Raises `ConfigError` for blocks that the kernels do not read."""
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
                sights=tuple(dict.fromkeys(layer.sight for layer in layers if layer.heads == heads)),
            )
            for heads in dict.fromkeys(layer.heads for layer in layers)
        }
        block_size = config.model.kv.block_size
        if not all(plan.reads_blocks_of(block_size) for plan in self._plans.values()):
            raise ConfigError(
                f"blocks of {block_size} tokens are not read on a GPU by sequences of {config.model.max_model_len}: give"
                " --block-size 16, or another from 2 on"
            )

    def of(self, layer: AttentionLayer) -> AttentionPlan:
        """Return a layer's."""
        return self._plans[layer.heads]

    @property
    def only(self) -> AttentionPlan | None:
        """The plan of all layers, where one serves all."""
        return next(iter(self._plans.values())) if len(self._plans) == 1 else None

    def prepare(self, rows: StepRows) -> None:
        """See `AttentionPlan.prepare`."""
        for plan in self._plans.values():
            plan.prepare(rows)
