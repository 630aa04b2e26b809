"""Eager execution of a model with torch, on a GPU or on a CPU without the compiled kernels.

Implements `quintet.executor.runner.Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quintet.executor.backends.cpu.ops.activation import activate, clipped, xielu
from quintet.executor.backends.cpu.ops.paged_attention import paged_attention
from quintet.executor.backends.cpu.ops.rope_kv_write import rope_kv_write
from quintet.executor.backends.cpu.ops.states import (
    StateRows,
    causal_conv,
    delta_rule,
    head_scan,
    selective_scan,
)
from quintet.executor.batch import Batch, BatchBuilder
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.kv_memory import KvMemory
from quintet.executor.memory import to_device
from quintet.executor.model_config.share import KeptRange
from quintet.executor.model_config.spec import Activation
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.experts import Experts
from quintet.executor.models.layers.linear import Embedding, HeadLinear, Linear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.layers.states import CausalConv, DeltaRule, HeadScan, SelectiveScan, StatePart
from quintet.executor.models.model import PooledModel
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.process.spans import TraceSpan, no_span

MAX_OUTPUTS = 256


class EagerModel(Protocol):
    """A model that can run eagerly: `quintet.executor.models.model.CausalModel`, or one of transformers."""

    @property
    def attentions(self) -> Sequence[AttentionLayer]:
        """Attention layers of the model."""

    @property
    def ropes(self) -> Sequence[Rope]:
        """See `CausalModel.ropes`."""

    def forward(self, ops: EagerPass) -> torch.Tensor:
        """See `CausalModel.forward`."""

    def logits(self, ops: EagerPass, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.logits`."""


class EagerPass:
    """Pass of one step over tensors; implements `quintet.executor.models.forward.ForwardPass`."""

    def __init__(
        self,
        batch: Batch,
        kv: KvMemory,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        embeds: StepEmbeds | None = None,
    ) -> None:
        """rotations: per rope of the model, see `Rope.cos_sin`; embeds: input embeddings of tokens without ids."""
        self._batch = batch
        self._kv = kv
        self._rotations = rotations
        self._embeds = embeds
        self.num_started = 0
        """Number of started layers; earlier ones are complete or queued on a device."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 ``[num_tokens]``."""
        return self._batch.token_ids

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[num_tokens]``."""
        return self._batch.positions

    def embedding(self, layer: Embedding) -> torch.Tensor:
        self.num_started += 1
        embedded = layer(self._batch.token_ids)
        if self._embeds is not None:
            self._embeds.put(embedded)
        return embedded

    def add_positions(self, x: torch.Tensor, table: torch.Tensor, offset: int) -> torch.Tensor:
        return x + table.index_select(0, self._batch.positions + offset)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(x)

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        self.num_started += 1
        y = layer(x)
        return y if layer.lora is None else layer.lora.add(x, y, self._batch.adapters)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def clip(self, x: torch.Tensor, bound: float) -> torch.Tensor:
        return clipped(x, -bound, bound)

    def from_previous_stage(self, width: int) -> torch.Tensor:
        raise AssertionError(
            f"input of width {width} from a previous stage: eager execution does not support pipeline stages"
        )

    def of_all_ranks(self, x: torch.Tensor, kept: KeptRange) -> torch.Tensor:
        """See `ForwardPass`. There is only one rank."""
        assert kept.is_all, kept
        return x

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap

    def activation(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        return activate(x, kind)

    def xielu(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return xielu(x, numbers)

    def columns(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        return x.narrow(1, begin, width)

    def head_linear(self, layer: HeadLinear, x: torch.Tensor) -> torch.Tensor:
        self.num_started += 1
        return layer(x)

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, y), dim=1)

    def experts(self, layer: Experts, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_started += 1
        return layer(x, scores)

    def attention(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.num_started += 1
        batch, (group, (keys, values)) = self._batch, self._kv.of_layer(layer)
        if not layer.norms_after_rope:
            q = q if layer.q_norm is None else layer.q_norm(q)
            k = k if layer.k_norm is None else layer.k_norm(k)
        q, k = (x.unflatten(1, (-1, layer.head_dim)) for x in (q, k))
        v = v.unflatten(1, (-1, layer.value_width))
        rotation = None if layer.rope is None else self._rotations[layer.rope]
        cache = (keys, values, batch.blocks[group], batch.offsets)
        q = rope_kv_write(layer, q, k, v, rotation, batch.positions, *cache)
        attended = paged_attention(
            layer, q, keys, values, batch.attention[group, layer.attention_window, layer.heads]
        )
        return attended.reshape(batch.num_tokens, -1).contiguous()  # otherwise a view if head_dim is 1

    def causal_conv(self, layer: CausalConv, x: torch.Tensor) -> torch.Tensor:
        rows, states = self._states(layer.state, x.dtype)
        return causal_conv(rows, states, x, layer.weight, layer.bias, layer.silu)

    def selective_scan(
        self,
        layer: SelectiveScan,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor,
    ) -> torch.Tensor:
        rows, states = self._states(layer.state)
        return selective_scan(rows, states, x, dt, b, c, gate, layer.a, layer.dt_bias, layer.skip)

    def head_scan(
        self,
        layer: HeadScan,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, states = self._states(layer.state)
        parameters = (layer.a, layer.dt_bias, layer.skip, layer.dt_limits)
        return head_scan(rows, states, x, dt, b, c, gate, *parameters)

    def delta_rule(
        self,
        layer: DeltaRule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        rows, states = self._states(layer.state)
        return delta_rule(rows, states, q, k, v, alpha, beta, layer.a, layer.dt_bias)

    def _states(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StateRows, torch.Tensor]:
        self.num_started += 1
        group, states = self._kv.of_state(part, dtype)
        return self._batch.states[group], states


class EagerRunner:
    """A `Runner`: a model, its KV memory as tensors, and the hidden states of the last step."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        model: EagerModel,
        device: torch.device,
        kv: KvMemory,
        span: TraceSpan = no_span,
    ) -> None:
        """kv: keys and values in the model's dtype."""
        self._span = span
        self._model = model
        self._device = device
        self._dtype = dtype = kv.dtype
        self._kv, spec = kv, kv.spec
        self._builder = BatchBuilder(
            spec.block_size,
            ((spec.place(layer.index)[0], layer.attention_window, layer.heads) for layer in model.attentions),
            any(rope.spec.depends_on_length for rope in model.ropes),
            dtype,
        )
        self._pass: EagerPass | None = None
        self._hidden = torch.empty(0)
        self._num_done_before = 0

    @property
    def work_done(self) -> int:
        """Total number of computed layers."""
        current = self._pass
        return self._num_done_before + (0 if current is None else current.num_started)

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        batch = self._builder.build(rows, tables)
        rotations = [rope.cos_sin(batch.positions, batch.prompts, self._dtype) for rope in self._model.ropes]
        self._span("arrays")
        self._num_done_before = self.work_done
        embeds = embeds_of(rows, self._dtype, self._device)
        self._pass = EagerPass(batch, self._kv, rotations, embeds)
        self._hidden = self._model.forward(self._pass)

    def logits(self, tokens: Int) -> torch.Tensor:
        assert self._pass is not None, "no step has run"
        return self._model.logits(self._pass, self._hidden_of(tokens))

    @torch.inference_mode()
    def normed(self, tokens: Int) -> torch.Tensor:
        assert self._pass is not None and isinstance(self._model, PooledModel), self._model
        return self._model.normed(self._pass, self._hidden_of(tokens))

    def _hidden_of(self, tokens: Int) -> torch.Tensor:
        hidden = self._hidden
        return hidden[to_device(tokens, self._device)] if len(tokens) < len(hidden) else hidden

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> None:
        """See `Runner.forward_and_draw`; not supported."""
