"""Consecutive steps of the same decode rows, all without drafts.

Each row advances by one token a step, so only the starts differ from the step before. Tables and statistics are updated once,
after the last of these steps.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from quintet.executor.memory import Bits
from quintet.executor.ragged import Int
from quintet.wire.step import StepPlan, StepResult

MAX_STEPS = 64
"""Steps after which tables and statistics are updated."""


class PlainSteps:
    """Steps without drafts after one with the same rows."""

    def __init__(
        self, plan: StepPlan, slots: NDArray[np.int32], starts: NDArray[np.int32], uses: Int, max_tokens: int
    ) -> None:
        """plan: of decode rows without drafts, one token each. starts: int32[R], of the first of these steps.

        uses: see `quintet.executor.speculation.unknown_draws.UnknownDraws.uses`. max_tokens: of all steps, since their hidden
        states are kept; also the limit of one step.
        """
        self._slot_column, self._counts, self._samples = plan.slots, plan.counts, plan.samples
        self._no_drafts = bytes(len(plan.samples))
        self.starts, self.slots, self.uses = starts, slots, uses
        self.num_begun = 0
        """Number of steps that began."""
        self.num_steps, self.seconds = 0, 0.0
        """Number and total time of the computed steps."""
        self.hidden: list[Bits] = []
        """Hidden states ``[rows, width]`` of each step, if the drafter reads them."""
        self._max_steps = min(MAX_STEPS, max_tokens // len(slots))

    def has_next(self, plan: StepPlan) -> bool:
        """Return whether the plan has the same rows, and each computes the newest token of its request."""
        return (
            plan.slots == self._slot_column
            and plan.counts == self._counts
            and plan.samples == self._samples
            and 0 not in plan.drafts
            and self.num_begun < self._max_steps
        )

    def next(self, plan: StepPlan) -> StepPlan:
        """Begin a step: return the plan with the executor's starts."""
        starts = self.starts + self.num_begun
        self.num_begun += 1
        return msgspec.structs.replace(plan, starts=starts.tobytes(), drafts=b"")

    def end(self, result: StepResult, seconds: float) -> None:
        """Note the result and the time of a step."""
        result.num_tokens, result.num_drafts = self._samples, self._no_drafts
        self.num_steps += 1
        self.seconds += seconds
