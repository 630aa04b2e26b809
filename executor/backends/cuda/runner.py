"""A model on a device: its KV memory, its steps launched kernel by kernel, and its decode steps as captured graphs.

Knows nothing of plans, requests or what is drawn besides a draw from the logits as they are:
`quintet.executor.backends.cuda.worker` does. What computes a step launches it and returns; only boot and captures
wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import AttentionBackend, HostRows
from quintet.executor.backends.cuda.attention.plans import AttentionPlans
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.forward import DevicePass, Value
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.backends.cuda.group import DeviceGroup
from quintet.executor.backends.cuda.kv_memory import DeviceKv
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.executor.backends.cuda.ops.draw import draw
from quintet.executor.backends.cuda.ops.peers import RanksApart
from quintet.executor.backends.cuda.ops.tables import apply_plan, scatter_tokens
from quintet.executor.backends.cuda.rows import SampledRows, StepRows
from quintet.executor.backends.cuda.tables import DeviceTables, StepMemory
from quintet.executor.batch import Int
from quintet.executor.embeds import StepEmbeds
from quintet.executor.memory import to_device
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import Linear
from quintet.executor.models.layers.rope import Rope
from quintet.executor.models.model import CausalModel

MAX_OUTPUTS = 256
"""Rows of logits that prompt log-probabilities come by."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step leaves on the device. Overwritten by the step after it."""

    logits: torch.Tensor
    """``[num_sampled or more, vocab]`` in float32 or the model's dtype."""
    tokens: torch.Tensor
    """int32, as many: drawn from the logits as they are, and written into the token table."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured decode step of a padded size."""

    num_rows: int
    _replay: Callable[[], None]
    _drawn: Drawn
    """Where the step leaves what it draws, at every replay."""

    def replay(self) -> Drawn:
        """Launch the step for the plan that is in the staging buffer."""
        self._replay()
        return self._drawn


class DeviceRunner:
    """See the module. A `quintet.executor.runner.GivesLogits`."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        device: Device,
        model: CausalModel,
        linears: DeviceLinears,
        attention: AttentionPlans,
        memory: StepMemory,
        staging: torch.Tensor,
        kv: DeviceKv,
        dtype: torch.dtype,
        group: DeviceGroup | None = None,
    ) -> None:
        """staging: int32 on the device, where a plan's words are copied to before its step. group: of a rank of several, whose
        others launch the same."""
        self._device = device
        self._group = group
        self._model = model
        self._linears = linears
        self._attention = attention
        self._memory = memory
        self._staging = staging
        self._dtype = dtype
        self.of_prompts: AttentionBackend | None = None
        """Whose attention computes steps with more than a token in a row; None for ours."""
        self.use_kv(kv)
        self._rotations = _Rotations(model, memory.tables, dtype)
        self._pass: DevicePass | None = None
        self._hidden = Value(torch.empty(0))
        self._kept: Drawn | None = None

    def use_kv(self, kv: DeviceKv) -> None:
        """Compute over other memory from now on. Not once a graph was captured."""
        self.kv = kv
        self.pool = BlockPool.of(self._device, kv.places)

    @property
    def device(self) -> Device:
        """Where it launches."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._dtype

    @property
    def tables(self) -> DeviceTables:
        """What the device knows of each slot."""
        return self._memory.tables

    @property
    def linears(self) -> list[Linear]:
        """The model's linear layers, once a step has run."""
        assert self._pass is not None, "no step has run"
        return list(self._pass.linears)

    @property
    def widest(self) -> int:
        """See `DevicePass.widest`, once a step has run."""
        assert self._pass is not None, "no step has run"
        return self._pass.widest

    @property
    def attentions(self) -> list[AttentionLayer]:
        """The model's attention layers, once a step has run."""
        assert self._pass is not None, "no step has run"
        return self._pass.attentions

    def try_largest_step(self, num_tokens: int, num_rows: int) -> None:
        """Compute a step of so many tokens of padding, so that whatever a step needs has been loaded, chosen and allocated."""
        self._clear_staging()
        self.compute(self._staging, num_rows, num_tokens, num_tokens, num_rows)
        self._device.synchronize()

    def try_smallest_steps(self) -> None:
        """Have loaded what steps without prompts launch, and copies of blocks: of several ranks no other is to wait for it
        within a step. They all call this."""
        self._clear_staging()
        self.compute(self._staging, 1, 1, 1, 1)
        self.copy_blocks(self._staging[:2])
        self._device.synchronize()

    def apply_deltas(self, staging: torch.Tensor) -> None:
        """Bring the device's tables up to a plan without rows, or whose rows are computed later."""
        apply_plan(self._device, staging, self.tables, self._memory.rows(0, 0, 0), self._memory.sampled(0))

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
        """Launch a whole step, kernel by kernel. The sizes may be padded, unless ``host`` says what the rows are."""
        rows = self._memory.rows(num_rows, num_tokens, max_count)
        sampled = self._memory.sampled(num_sampled)
        apply_plan(self._device, staging, self.tables, rows, sampled)
        if self._group is not None:
            self._group.take_ids(rows.token_ids)
        self._forward(rows, host, embeds)
        return self._draw(rows, sampled)

    def capture_decode(self, num_rows: int) -> DecodeGraph:
        """Capture the step of so many rows of one token each, all of which draw. Reads the plan from ``staging``."""
        self._clear_staging()
        # What is loaded, chosen or allocated at first use must not be while capturing.
        try:
            drawn = self.compute(self._staging, num_rows, num_rows, 1, num_rows)
        except torch.OutOfMemoryError as error:
            if self._group is None:
                raise
            raise RanksApart(f"others wait for a step that was launched in part: {error}") from error
        room = self._room(drawn)
        self._device.synchronize()

        def step() -> None:
            drawn = self.compute(self._staging, num_rows, num_rows, 1, num_rows)
            room.logits.copy_(drawn.logits)
            room.tokens.copy_(drawn.tokens)

        return DecodeGraph(num_rows, self._device.capture(step), room)

    def _room(self, drawn: Drawn) -> Drawn:
        """Return memory for as much as was drawn. All graphs leave it there: what one kept in the graphs' pool would be
        lost to the others, and logits of every padded size are gigabytes."""
        count = len(drawn.tokens)
        if self._kept is None or len(self._kept.tokens) < count:
            self._kept = Drawn(torch.empty_like(drawn.logits), torch.empty_like(drawn.tokens))
        return Drawn(self._kept.logits[:count], self._kept.tokens[:count])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks of every layer's KV; pairs: int32[2 * n] on the device, ``from block, to block``."""
        copy_blocks(self._device, self.pool, self.pool, pairs.view(-1, 2))

    def _clear_staging(self) -> None:
        """A plan of nothing: padding rows only."""
        self._staging.zero_()

    def _forward(self, rows: StepRows, host: HostRows | None, embeds: StepEmbeds | None) -> None:
        self._attention.prepare(rows)
        backend = self.of_prompts if host is not None and rows.max_count > 1 else None
        if backend is not None and host is not None:
            backend.prepare(rows.of_group(0), host)
        rotations = self._rotations.of(rows)
        self._pass = DevicePass(
            *(self._device, self._linears, self._attention, rows, self.kv, rotations, backend, embeds),
            self._group,
        )
        self._hidden = self._model.forward(self._pass)

    def _draw(self, rows: StepRows, sampled: SampledRows) -> Drawn:
        nothing = torch.empty(0, device=self._device.torch_device)
        if not sampled.num_rows:
            return Drawn(nothing, nothing)
        hidden = self._hidden
        if sampled.num_rows < rows.num_tokens or rows.max_count > 1:
            hidden = hidden.take(sampled.tokens)
        logits = self._logits(hidden)
        if logits is None:
            return Drawn(nothing, nothing)
        tokens = draw(self._device, logits, self.tables.settings, sampled.slots, sampled.positions)
        scatter_tokens(self._device, tokens, sampled, self.tables)
        return Drawn(logits, tokens)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `GivesLogits`; of the last step that `compute` launched. Nothing at a rank that is not the first."""
        index = to_device(np.ascontiguousarray(tokens), self._device.torch_device)
        logits = self._logits(self._hidden.take(index))
        return torch.empty(0, device=self._device.torch_device) if logits is None else logits

    def _logits(self, hidden: Value) -> torch.Tensor | None:
        """Return logits of some rows, of all ranks' parts of the vocabulary; None at a rank that is not the first."""
        assert self._pass is not None, "no step has run"
        logits = self._model.logits(self._pass, hidden).settled
        return logits if self._group is None else self._group.logits(logits, self._model.vocab_size)


class _Rotations:
    """Cosines and sines of a step's tokens, from tables by position, or computed where they depend on the length."""

    def __init__(self, model: CausalModel, tables: DeviceTables, dtype: torch.dtype) -> None:
        self._ropes = model.ropes
        self._dtype = dtype
        positions = torch.arange(tables.token_ids.shape[1], device=tables.token_ids.device)
        self._tables = [
            None if rope.spec.depends_on_length else self._cos_sin(rope, positions, None)
            for rope in model.ropes
        ]
        """Of each rope ``[max_model_len + 1, rotary_dim]``."""

    def of(self, rows: StepRows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``[num_tokens, rotary_dim]`` of each rope. What padding tokens get is not used."""
        positions, found = rows.positions.clamp(min=0), []
        for rope, table in zip(self._ropes, self._tables, strict=True):
            if table is None:
                assert rows.prompts is not None
                found.append(self._cos_sin(rope, positions, rows.prompts))
            else:
                found.append((table[0].index_select(0, positions), table[1].index_select(0, positions)))
        return found

    def _cos_sin(
        self, rope: Rope, positions: torch.Tensor, prompts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope.cos_sin(positions, prompts, self._dtype)
        return cos.squeeze(1), sin.squeeze(1)
