"""What the main loop needs of a worker, whether it computes with torch or pretends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quintet.executor.expert_metrics import ExpertCounts
from quintet.wire.kv_disk import KvTierRequests, KvTierResults
from quintet.wire.step import StepPlan, StepResult


class Pending(Protocol):
    """A step that was begun. Its worker's steps end in the order in which they were begun."""

    @property
    def device_ms(self) -> float | None:
        """How long the device computed, once `result` has returned; None where nobody measured it there."""

    @property
    def gap_ms(self) -> float | None:
        """How long the device had nothing to do before this step; None where nobody measured it, or no step came before."""

    def wait(self) -> None:
        """Block until the step has ended, others running meanwhile. Called from any thread, more than once.

        May raise what ended the step; `result` raises it again.
        """

    def result(self) -> StepResult:
        """Return what was drawn, or raise what ended the step. Called once, by the loop, after `wait`."""


@dataclass(slots=True)
class Finished:
    """The `Pending` of a worker that computes at once: the step is over when it has begun."""

    outcome: StepResult

    device_ms = None
    gap_ms = None

    def wait(self) -> None:
        """There is nothing to wait for."""

    def result(self) -> StepResult:
        """See `Pending`."""
        return self.outcome


class KvTierWorker(Protocol):
    """Blocks of KV memory on disk, of other servers and for them, or in a store. Used from the loop only; works beside it."""

    @property
    def num_staging_blocks(self) -> int:
        """Host blocks that what comes from there lies in until it is copied in, numbered behind all others."""

    def begin(self, ring: Callable[[], None]) -> None:
        """Begin to take orders. ring: tells the loop, from another thread, that there are answers."""

    def order(self, orders: KvTierRequests) -> None:
        """Take what is to be kept or offered out of KV memory, as it is now; do the rest later."""

    def copy_in(self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32]) -> None:
        """Copy what was fetched, from these host blocks, into blocks of KV memory."""

    def take_answers(self) -> KvTierResults | None:
        """Return what became of orders since the last call, for the newest tables ordered about; None without any."""

    def reset(self) -> None:
        """Forget what was looked for and is to be fetched: the tables were emptied. What a store is to keep is kept."""

    def close(self) -> None:
        """Finish what was ordered, as far as that takes no longer than anybody waits, and let go of files and sockets."""


class KvDisk(KvTierWorker, Protocol):
    """On disk: what lies there has numbers, and is told of at boot."""

    @property
    def num_places(self) -> int:
        """Blocks there is room for on disk."""

    def kept(self) -> list[tuple[int, bytes]]:
        """Return place and key of all that is on disk, what was written longest ago first."""


class StepWorker(Protocol):
    """Executes plans in the order of the core that made them."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there is memory for."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory there are, for `StepPlan.swaps_out` to fill."""

    @property
    def swap_bytes_per_s(self) -> int:
        """How fast it copies between device and host, the slower way, as measured; 0 if it was not."""

    @property
    def kv_disk(self) -> KvDisk | None:
        """Where blocks outlive this process; None where they do not."""

    @property
    def kv_peers(self) -> KvTierWorker | None:
        """The servers that share requests with this one; None where there are none."""

    @property
    def kv_store(self) -> KvTierWorker | None:
        """What other servers have computed, too; None where there is no such store."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Short words for the boot story."""

    @property
    def work_done(self) -> int:
        """A count that grows while a step is computed, read from another thread: standing still in a step means hanging.

        Of a device, what it has completed, not what it was given.
        """

    @property
    def num_tenants(self) -> int:
        """Slots that have a tenant, after the plan that was begun last."""

    @property
    def num_split(self) -> int:
        """Steps that were computed in parts, because memory ran out."""

    @property
    def experts(self) -> ExpertCounts | None:
        """What was asked of the model's experts; None where there are none, or nobody counts."""

    @property
    def has_chores(self) -> bool:
        """Whether there is work for later that can be done while nobody waits."""

    def do_chore(self) -> None:
        """Do a piece of it: shorter than anybody would mind who comes meanwhile. Called with nothing in flight."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Whether the oldest step whose result was not asked for has to be over before this plan is begun.

        `begin` waits for it otherwise, and its result is sent later than it could be.
        """

    def begin(self, plan: StepPlan) -> Pending:
        """Apply the plan's deltas and have its rows computed behind those of the plan before, without waiting for a device.

        Raises what is wrong with the plan or the tables; what goes wrong on the device, `Pending` tells.
        """

    def reset(self) -> None:
        """Empty every table, whatever `begin` left in them: a new core, or one whose step failed, begins anew.

        What is pending is void: nobody asks for its result, and nothing it still does may reach what comes after.
        """

    def is_broken(self, error: Exception) -> bool:
        """Return whether what a step raised means that nothing can be computed any more in this process."""
