"""Interface between the executor's main loop and its worker, real or mock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quintet.executor.expert_metrics import ExpertCounts
from quintet.executor.speculation.output_cache import OutputCache
from quintet.wire.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quintet.executor.kv_transfer.connector import KvConnector


class Pending(Protocol):
    """A started step. A worker's steps end in the order in which they started."""

    @property
    def device_ms(self) -> float | None:
        """Compute time on the device, available after `result`; None if not measured."""

    @property
    def gap_ms(self) -> float | None:
        """Idle time of the device before this step; None if not measured or for the first step."""

    def wait(self) -> None:
        """Block until the step has ended. Any thread may call it, more than once, while other threads run.

        May raise the error that ended the step; `result` raises it again.
        """

    def result(self) -> StepResult:
        """Return the step's result, or raise the error that ended it. The loop calls it once, after `wait`."""


@dataclass(slots=True)
class Finished:
    """The `Pending` of a worker that computes synchronously: the step ends inside `begin`."""

    outcome: StepResult

    device_ms = None
    gap_ms = None

    def wait(self) -> None:
        """Return immediately."""

    def result(self) -> StepResult:
        return self.outcome


class StepWorker(Protocol):
    """Executes plans in the order of the core that made them."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in memory."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory, the targets of `StepPlan.swaps_out`."""

    @property
    def swap_bytes_per_s(self) -> int:
        """Measured copy rate between device and host, the slower direction; 0 if not measured."""

    @property
    def kv(self) -> KvConnector | None:
        """KV back ends: disk, peer servers, shared store. None if the worker supports none."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Short facts for the start-up log."""

    @property
    def work_done(self) -> int:
        """Progress counter, read from another thread: no growth during a step means a hang.

        A device counts completed work, not submitted work.
        """

    @property
    def num_active_slots(self) -> int:
        """Slots in use after the last started plan."""

    @property
    def num_split(self) -> int:
        """Steps split after running out of memory."""

    @property
    def experts(self) -> ExpertCounts | None:
        """Load counters of the model's experts; None if the model has none or they are not counted."""

    @property
    def output_cache(self) -> OutputCache | None:
        """Cached outputs of suffix decoding; None if it is not used."""

    @property
    def has_idle_tasks(self) -> bool:
        """True if idle tasks are left."""

    def run_idle_task(self) -> None:
        """Run one short idle task. Called with no step in flight, or between two steps under load."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Return whether the oldest step without a requested result must end before this plan starts.

        `begin` would wait for that step otherwise and delay the step's result.
        """

    def begin(self, plan: StepPlan) -> Pending:
        """Apply the plan's deltas and queue its rows after those of the previous plan. On a CPU, compute them.

        Raises errors of the plan or the tables; `Pending` raises errors of the device.
        """

    def reset(self) -> None:
        """Reset every table, whatever `begin` left in them, for a new core or after a failed step.

        Pending steps are void: their results are not requested, and their late writes must not affect later steps.
        """

    def is_broken(self, error: Exception) -> bool:
        """Return whether a step's error means that this process cannot compute any further step."""
