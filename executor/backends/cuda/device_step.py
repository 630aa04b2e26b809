"""A step on the device, from its launch to its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Event
from quintet.executor.backends.cuda.graphs import GraphSize
from quintet.executor.backends.cuda.step_clock import StepClock
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.slots import Rows
from quintet.executor.speculation.verify import DraftedStep
from quintet.wire.step import StepResult


@dataclass(slots=True)
class DeviceStep:
    """A launched step; implements `quintet.executor.interface.Pending`."""

    outcome: StepResult
    _start: Event
    _end: Event
    _previous_end: Event | None
    """End of the previous step."""
    _tokens: torch.Tensor
    """int32[num_sampled], pinned; valid once the step has ended."""
    _on_end: Callable[[DeviceStep], None]
    """May raise an error that invalidates the tokens. Removes rejected drafts from the result."""
    _clock: StepClock
    _graph_size: GraphSize | None
    """Size of the replayed graph; None for an eager step."""
    _expected_end_s: float | None
    rows: Rows
    """The plan's rows, drafts included."""
    drafted: DraftedStep | None = None
    """Drafts of the step; None without speculative decoding."""
    masks: StepMasks | None = None
    """Masks of its structured outputs."""
    _is_noted: bool = False
    """The grammar matchers have its tokens."""
    is_ended: bool = False
    device_ms: float | None = None
    gap_ms: float | None = None

    def wait(self) -> None:
        self._end.wait(self._expected_end_s)

    def advance_matchers(self) -> None:
        """Wait for the step and give its tokens to the grammar matchers."""
        if self.masks is not None and not self._is_noted:
            self._is_noted = True
            self._end.wait()
            self.masks.note(self._tokens.tolist())

    def result(self) -> StepResult:
        """See `Pending`. Later calls return the same result: a step may end before the loop asks for its result."""
        if self.is_ended:
            return self.outcome
        self._end.wait()
        self.device_ms = self._end.elapsed_ms(self._start)
        self._clock.ended(self._graph_size, self.device_ms)
        if self._previous_end is not None:
            self.gap_ms = self._start.elapsed_ms(self._previous_end)
        self.outcome.token_ids = self._tokens.numpy().tobytes()
        self._on_end(self)
        self.is_ended = True
        return self.outcome
