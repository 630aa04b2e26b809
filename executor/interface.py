"""What the main loop needs of a worker, whether it computes with torch or pretends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quintet.wire.step import StepPlan, StepResult


class StepWorker(Protocol):
    """Executes plans in the order of the core that made them."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there is memory for."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Short words for the boot story."""

    @property
    def work_done(self) -> int:
        """A count that grows while a step is computed, read from another thread: standing still in a step means hanging."""

    @property
    def num_tenants(self) -> int:
        """Slots that have a tenant."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's deltas, compute its rows, and return what was drawn."""

    def reset(self) -> None:
        """Empty every table, whatever `execute` left in them: a new core, or one whose step raised, begins anew."""

    def is_broken(self, error: Exception) -> bool:
        """Return whether what `execute` raised means that nothing can be computed any more in this process."""
