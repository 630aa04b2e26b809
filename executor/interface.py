"""Interface between the executor's main loop and its worker, real or mock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quintet.executor.expert_metrics import ExpertCounts
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults
from quintet.wire.step import StepPlan, StepResult


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
        """See `Pending`."""
        return self.outcome


class KvTierWorker(Protocol):
    """KV blocks on disk, on other servers or in a store. The loop calls it; transfers run in the background."""

    @property
    def num_staging_blocks(self) -> int:
        """Host blocks that hold fetched data until it is copied in, numbered after all other host blocks."""

    def begin(self, ring: Callable[[], None]) -> None:
        """Start to accept requests. ring: wakes the loop, from another thread, when results are available."""

    def order(self, orders: KvTierRequests) -> None:
        """Copy the blocks to store or offer out of KV memory now; do the rest later."""

    def copy_in(self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32]) -> None:
        """Copy fetched data from these host blocks into blocks of KV memory."""

    def take_results(self) -> KvTierResults | None:
        """Return the results since the last call, for the newest table epoch; None if there are none."""

    def reset(self) -> None:
        """Cancel lookups and fetches after a reset of the tables. Writes to a store continue."""

    def close(self) -> None:
        """Finish accepted requests within the shutdown limit, then close files and sockets."""


class KvDisk(KvTierWorker, Protocol):
    """A disk tier: its blocks are numbered and listed at start-up."""

    @property
    def num_places(self) -> int:
        """Capacity on disk, in blocks."""

    def kept(self) -> list[tuple[int, bytes]]:
        """Return place and key of every block on disk, oldest write first."""


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
    def kv_disk(self) -> KvDisk | None:
        """The disk tier, which outlives this process; None if there is none."""

    @property
    def kv_peers(self) -> KvTierWorker | None:
        """The tier of blocks on peer servers; None if there are none."""

    @property
    def kv_store(self) -> KvTierWorker | None:
        """The shared store of KV blocks; None if there is none."""

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
    def has_idle_tasks(self) -> bool:
        """True if idle tasks are left."""

    def run_idle_task(self) -> None:
        """Run one short idle task. Called with no step in flight, or between two steps under load."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Return whether the oldest step without a requested result must end before this plan starts.

        `begin` would wait for that step otherwise and delay the step's result.
        """

    def begin(self, plan: StepPlan) -> Pending:
        """Apply the plan's deltas and queue its rows after those of the previous plan, without waiting for a device.

        Raises errors of the plan or the tables; `Pending` raises errors of the device.
        """

    def reset(self) -> None:
        """Reset every table, whatever `begin` left in them, for a new core or after a failed step.

        Pending steps are void: their results are not requested, and their late writes must not affect later steps.
        """

    def is_broken(self, error: Exception) -> bool:
        """Return whether a step's error means that this process cannot compute any further step."""
