"""Runs a model on a device: owns the KV memory, launches eager steps, and captures decode steps as graphs.

Knows no plans and no requests, and draws only from unmodified logits; `quintet.executor.backends.cuda.worker` does the rest.
A step is launched without waiting; only startup and graph capture synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import AttentionBackend, HostRows
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.forward import DevicePass, Value
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.backends.cuda.graphs import GraphSize
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlans
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.executor.backends.cuda.ops.collectives import RankDesyncError
from quintet.executor.backends.cuda.ops.draw import draw
from quintet.executor.backends.cuda.ops.tables import apply_plan, scatter_drafts, scatter_tokens
from quintet.executor.backends.cuda.ranks.communicator import DeviceCommunicator
from quintet.executor.backends.cuda.tables import DeviceTables, SampledRows, StepMemory, StepRows
from quintet.executor.embeds import StepEmbeds
from quintet.executor.kv_memory import KvMemory
from quintet.executor.memory import to_device
from quintet.executor.models.draft_heads import observed_forward
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import CausalModel, PooledModel
from quintet.executor.ragged import Int

MAX_OUTPUTS = 256
"""Rows of logits per chunk of prompt log-probabilities."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of a step on the device; the next step overwrites it."""

    logits: torch.Tensor
    """``[num_sampled or more, vocab]`` in float32 or the model's dtype."""
    tokens: torch.Tensor
    """int32, as many: drawn from the unmodified logits, and written to the token table."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured decode step of a padded size."""

    size: GraphSize
    _replay: Callable[[], None]
    _drawn: Drawn
    """Result of every replay."""

    def replay(self) -> Drawn:
        """Launch the step for the plan in the staging buffer."""
        self._replay()
        return self._drawn


class DeviceRunner:
    """See the module; implements `quintet.executor.runner.LogitsSource`."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        device: Device,
        model: CausalModel,
        linears: DeviceLinears,
        attention: AttentionPlans,
        memory: StepMemory,
        staging: torch.Tensor,
        kv: KvMemory,
        dtype: torch.dtype,
        communicator: DeviceCommunicator | None = None,
    ) -> None:
        """staging: int32 on the device, receives a plan's words before its step. communicator: of several ranks, if any."""
        self.device = device
        self.communicator = communicator
        self._model = model
        self.linears = linears
        self.attention = attention
        self._memory = memory
        self.tables, self.max_draws = memory.tables, memory.max_draws
        """Slot tables on the device, and the maximum draws of a step."""
        self.staging = staging
        self.dtype = dtype
        self.aux_layers: Sequence[int] = ()
        """Numbers of layers after which a served model keeps its hidden states for a draft head, joined."""
        self.keeps_hidden = False
        """True for a draft head or a model with `aux_layers`: see `kept_hidden`."""
        self._received_hidden: torch.Tensor | None = None
        self._kept_hidden: torch.Tensor | None = None
        self.prompt_attention: AttentionBackend | None = None
        """Backend for steps with more than one token in a row; None: our kernels."""
        self.use_kv(kv)
        self._rotations = _Rotations(model, memory.tables, dtype)
        self._pass: DevicePass | None = None
        self._hidden = Value(torch.empty(0))
        self._last_output: Drawn | None = None

    def use_kv(self, kv: KvMemory) -> None:
        """Replace the KV memory. Not allowed after a graph was captured."""
        self.kv = kv
        self.pool = BlockPool.of(self.device, kv.places)

    @property
    def last_pass(self) -> DevicePass:
        """The pass of the last step."""
        assert self._pass is not None, "no step has run"
        return self._pass

    @property
    def received_hidden(self) -> torch.Tensor:
        """Features ``[max_tokens, width]`` of the next step's tokens, which a draft head reads."""
        assert self._received_hidden is not None, "no step of a head has run"
        return self._received_hidden

    @property
    def kept_hidden(self) -> torch.Tensor:
        """Hidden states ``[max_tokens, width]`` of the last step's tokens: after `aux_layers`, or a head's own."""
        assert self._kept_hidden is not None, "no step has kept hidden states"
        return self._kept_hidden

    def run_largest_step(self) -> None:
        """Run a step of padding tokens, so that everything that a step needs is loaded, selected and allocated."""
        self.staging.zero_()  # an empty plan, with padding rows only
        memory = self._memory
        self.compute(self.staging, memory.max_rows, memory.max_tokens, memory.max_tokens, memory.max_draws)
        self.device.synchronize()

    def run_smallest_steps(self) -> None:
        """Load the kernels of decode steps and of block copies. All ranks call it, so that none waits for a load in a step."""
        self.staging.zero_()  # an empty plan, with padding rows only
        self.compute(self.staging, 1, 1, 1, 1)
        self.copy_blocks(self.staging[:2])
        self.device.synchronize()

    def put_drafts(self, drafts: torch.Tensor) -> None:
        """Write draft tokens to the token table; drafts: the words of `PackedPlan.drafts` on the device."""
        scatter_drafts(self.device, drafts, self.tables)

    def apply_deltas(self, staging: torch.Tensor) -> None:
        """Apply a plan's deltas to the device's tables without computing its rows."""
        apply_plan(self.device, staging, self.tables, self._memory.rows(0, 0, 0), self._memory.sampled(0))

    def compute(
        self,
        staging: torch.Tensor,
        num_rows: int,
        num_tokens: int,
        max_count: int,
        num_sampled: int,
        host: HostRows | None = None,
        embeds: StepEmbeds | None = None,
    ) -> Drawn:
        """Launch a whole step eagerly. The sizes may be padded, unless ``host`` is given."""
        rows = self._memory.rows(num_rows, num_tokens, max_count)
        sampled = self._memory.sampled(num_sampled)
        apply_plan(self.device, staging, self.tables, rows, sampled)
        if self.communicator is not None:
            self.communicator.broadcast_ids(rows.token_ids)
        self._forward(rows, host, embeds)
        return self._draw(rows, sampled)

    def capture_decode(self, size: GraphSize) -> DecodeGraph:
        """Capture a decode step, in which a draw follows each token. The graph reads ``staging``."""
        num_tokens, max_count = size
        sizes = min(num_tokens, self._memory.max_rows), num_tokens, max_count, num_tokens
        self.staging.zero_()  # an empty plan, with padding rows only
        # Loads, selections and allocations of the first use must not happen during capture.
        try:
            drawn = self.compute(self.staging, *sizes)
        except torch.OutOfMemoryError as error:
            if self.communicator is None:
                raise
            raise RankDesyncError(
                f"this rank launched a step only in part, and the other ranks wait: {error}"
            ) from error
        output = self._output(drawn)
        self.device.synchronize()

        def step() -> None:
            drawn = self.compute(self.staging, *sizes)
            output.logits.copy_(drawn.logits)
            output.tokens.copy_(drawn.tokens)

        return DecodeGraph(size, self.device.capture(step), output)

    def _output(self, drawn: Drawn) -> Drawn:
        """Return output memory shaped like ``drawn``, shared by all graphs.

        Output in the graphs' pool would be separate for every graph, and logits of all padded sizes take gigabytes.
        """
        count = len(drawn.tokens)
        if self._last_output is None or len(self._last_output.tokens) < count:
            self._last_output = Drawn(torch.empty_like(drawn.logits), torch.empty_like(drawn.tokens))
        return Drawn(self._last_output.logits[:count], self._last_output.tokens[:count])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks of every layer's KV; pairs: int32[2 * n] on the device, ``from block, to block``."""
        copy_blocks(self.device, self.pool, self.pool, pairs.view(-1, 2))

    def _forward(self, rows: StepRows, host: HostRows | None, embeds: StepEmbeds | None) -> None:
        self.attention.prepare(rows)
        backend = self.prompt_attention if host is not None and rows.max_count > 1 else None
        if backend is not None and host is not None:
            backend.prepare(rows.of_group(0), host)
        rotations = self._rotations.of(rows)
        self._pass = DevicePass(
            *(self.device, self.linears, self.attention, rows, self.kv, rotations, backend, embeds),
            *(self.communicator, self._receive),
        )
        self._hidden, observed = observed_forward(self._model, self._pass, self.aux_layers, are_joined=True)
        if self.keeps_hidden:
            (kept,) = observed or [self._hidden]
            if self._kept_hidden is None:
                self._kept_hidden = self._new_hidden(kept.materialized.shape[1])
            self._kept_hidden[: rows.num_tokens].copy_(kept.materialized)

    def _receive(self, width: int) -> torch.Tensor:
        if self._received_hidden is None:
            self._received_hidden = self._new_hidden(width)
        return self._received_hidden

    def _new_hidden(self, width: int) -> torch.Tensor:
        shape = self._memory.max_tokens, width
        return torch.zeros(shape, dtype=self.dtype, device=self.device.torch_device)

    def _draw(self, rows: StepRows, sampled: SampledRows) -> Drawn:
        empty = torch.empty(0, device=self.device.torch_device)
        if not sampled.num_rows:
            return Drawn(empty, empty)
        hidden = self._hidden
        if sampled.num_rows < rows.num_tokens or rows.max_count > 1:
            hidden = hidden.take(sampled.tokens)
        logits = self._logits(hidden)
        if logits is None:
            return Drawn(empty, empty)
        tokens = draw(self.device, logits, self.tables.settings, sampled.slots, sampled.positions)
        scatter_tokens(self.device, tokens, sampled, self.tables)
        return Drawn(logits, tokens)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `LogitsSource`; of the last step that `compute` launched. Empty at ranks other than 0."""
        index = to_device(np.ascontiguousarray(tokens), self.device.torch_device)
        logits = self._logits(self._hidden.take(index))
        return torch.empty(0, device=self.device.torch_device) if logits is None else logits

    def normed(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.pooling.HiddenSource`; of the last step. Each rank has whole hidden states."""
        assert isinstance(self._model, PooledModel), self._model
        index = to_device(np.ascontiguousarray(tokens), self.device.torch_device)
        return self._model.normed(self.last_pass, self._hidden.take(index)).materialized

    def _logits(self, hidden: Value) -> torch.Tensor | None:
        """Return logits of the rows, gathered over the ranks' vocabulary shards; None at ranks other than 0."""
        logits = self._model.logits(self.last_pass, hidden).materialized
        return (
            logits if self.communicator is None else self.communicator.logits(logits, self._model.vocab_size)
        )


class _Rotations:
    """Cosines and sines of a step's tokens: looked up by position, or computed if they depend on the length."""

    def __init__(self, model: CausalModel, tables: DeviceTables, dtype: torch.dtype) -> None:
        self._ropes = model.ropes
        self._dtype = dtype
        positions = torch.arange(tables.token_ids.shape[1], device=tables.token_ids.device)
        self._tables = [
            None if rope.spec.depends_on_length else self._cos_sin(rope, positions, None)
            for rope in model.ropes
        ]
        """Per rope: ``[max_model_len + 1, rotary_dim]``."""

    def of(self, rows: StepRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines ``[num_tokens, rotary_dim]`` per rope. Values of padding tokens are unused."""
        positions, rotations = rows.positions.clamp(min=0), []
        for rope, table in zip(self._ropes, self._tables, strict=True):
            if table is None:
                assert rows.prompts is not None
                rotations.append(self._cos_sin(rope, positions, rows.prompts))
            else:
                rotations.append((table[0].index_select(0, positions), table[1].index_select(0, positions)))
        return rotations

    def _cos_sin(
        self, rope: Rope, positions: torch.Tensor, prompts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope.cos_sin(positions, prompts, self._dtype)
        return cos.squeeze(1), sin.squeeze(1)
