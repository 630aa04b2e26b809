"""Runs a model of transformers on a CPU with compiled attention kernels; implements `quintet.executor.runner.Runner`."""

from __future__ import annotations

import torch

from quintet.executor.backends.cpu.ops.host_attention import PagedKv, attend, write_kv
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.kv_memory import KvMemory
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import SchedulerConfig

MAX_OUTPUTS = 256


class HostRunner:
    """A `Runner`: a model, its KV memory in the kernels' layout, and the hidden states of the last step."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        library: ProgramLibrary,
        model: TransformersModel,
        kv: KvMemory,
        limits: SchedulerConfig,
        span: TraceSpan = no_span,
    ) -> None:
        """Raises ConfigError if the kernels do not support the layers' heads or the block size."""
        self._span = span
        self._model = model
        self._step = Step(
            library, max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        )
        self._kv = [PagedKv.of_layer(kv, layer) for layer in model.attentions]
        self._hidden = torch.empty(0)
        self.token_ids = torch.from_numpy(self._step.columns["token_ids"])
        self.positions = torch.from_numpy(self._step.columns["positions"])
        self.work_done = 0
        """Total number of attention calls."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self._model.read_bytes

    @torch.inference_mode()
    def forward(self, rows: Rows, tables: SlotTables) -> None:
        self._step.fill(rows, tables)
        count, columns = self._step.c.num_tokens, self._step.columns
        self.token_ids = torch.from_numpy(columns["token_ids"])[:count]
        self.positions = torch.from_numpy(columns["positions"])[:count]
        self._span("arrays")
        self._hidden = self._model.forward(self)

    def attention(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.work_done += 1
        step, kv = self._step.c, self._kv[layer.index]
        return attend(step, layer, write_kv(step, layer, q, k, v, kv), kv)

    @torch.inference_mode()
    def logits(self, tokens: Int) -> torch.Tensor:
        return self._model.logits(self, self.normed(tokens))

    @torch.inference_mode()
    def normed(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.pooling.HiddenSource`. The last hidden states of transformers' models are normed."""
        hidden = self._hidden
        return hidden if len(tokens) == len(hidden) else hidden[torch.from_numpy(tokens)]

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> None:
        """See `Runner.forward_and_draw`; not supported."""
