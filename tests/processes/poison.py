"""`quintet serve` with an executor that fails on poison prompts.

``python -m tests.processes.poison serve …`` is the server; as a child of the supervisor the module is the executor. It wraps
the real worker.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quintet.deploy.cli import main as cli
from quintet.deploy.supervisor import supervisor
from quintet.executor import main
from quintet.executor.expert_metrics import ExpertCounts
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.speculation.output_cache import OutputCache
from quintet.process.child import child_main
from quintet.wire.ids import Role
from quintet.wire.step import StepPlan

POISON_PREFIX = [9, 9, 9, 9]
"""Prefix of poison prompts. The next two ids are an `Effect` and the number of outputs before it occurs."""


class Effect(enum.IntEnum):
    """Failure that a poison prompt causes."""

    RAISES = 11
    DIES = 12
    RAISES_FOR_ALL = 13
    """All further steps raise."""


def poison(effect: Effect, after: int = 0) -> list[int]:
    """Return a prompt that makes the executor fail after `after` outputs; 0: in the prefill."""
    return [*POISON_PREFIX, effect, after, 50, 51, 52]


class PoisonedWorker:
    """Wrapper of a worker that fails at the positions that poison prompts request."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._due: dict[int, tuple[int, int]] = {}
        """Slot -> effect, position of the failing token."""
        self._all_fail = False
        self.num_blocks = worker.num_blocks
        self.num_host_blocks = worker.num_host_blocks
        self.kv = worker.kv
        self.swap_bytes_per_s = worker.swap_bytes_per_s

    @property
    def facts(self) -> Mapping[str, str]:
        """Delegate to the wrapped worker."""
        return self._worker.facts

    @property
    def work_done(self) -> int:
        """Delegate to the wrapped worker."""
        return self._worker.work_done

    @property
    def num_active_slots(self) -> int:
        """Delegate to the wrapped worker."""
        return self._worker.num_active_slots

    def is_broken(self, error: Exception) -> bool:
        """Delegate to the wrapped worker."""
        return self._worker.is_broken(error)

    def reset(self) -> None:
        """Delegate to the wrapped worker."""
        self._due.clear()
        self._worker.reset()

    @property
    def num_split(self) -> int:
        """Delegate to the wrapped worker."""
        return self._worker.num_split

    @property
    def experts(self) -> ExpertCounts | None:
        """Delegate to the wrapped worker."""
        return self._worker.experts

    @property
    def output_cache(self) -> OutputCache | None:
        """Delegate to the wrapped worker."""
        return self._worker.output_cache

    @property
    def has_idle_tasks(self) -> bool:
        """Delegate to the wrapped worker."""
        return self._worker.has_idle_tasks

    def run_idle_task(self) -> None:
        """Delegate to the wrapped worker."""
        self._worker.run_idle_task()

    def waits_for(self, plan: StepPlan) -> bool:
        """Delegate to the wrapped worker."""
        return self._worker.waits_for(plan)

    def begin(self, plan: StepPlan) -> Pending:
        """Fail, or delegate to the wrapped worker."""
        for slot in np.frombuffer(plan.freed, np.int32).tolist():
            self._due.pop(slot, None)
        for row in plan.new_rows:
            prompt = np.frombuffer(row.token_ids, np.int32)[: row.num_prompt_tokens].tolist()
            if prompt[:4] == POISON_PREFIX:
                self._due[row.slot] = (prompt[4], row.num_prompt_tokens - 1 + prompt[5])
        rows = (np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.starts, plan.counts))
        for slot, start, count in zip(*rows, strict=True):
            effect, position = self._due.get(slot, (None, 0))
            if effect is not None and start <= position < start + count:
                self._fail(Effect(effect))
        if self._all_fail:
            raise RuntimeError("the device is missing")
        return self._worker.begin(plan)

    def _fail(self, effect: Effect) -> None:
        if effect is Effect.RAISES:
            raise ValueError("poison at\nwork")
        if effect is Effect.DIES:
            os.kill(os.getpid(), signal.SIGSEGV)
        self._all_fail = True


def run_executor() -> None:
    """Run the executor with a `PoisonedWorker`."""
    make = main.make_worker
    main.make_worker = lambda *given: PoisonedWorker(make(*given))  # type: ignore[assignment, return-value]
    child_main(Role.EXECUTOR, main.run)


def run_server(executor: str) -> int:
    """Run ``quintet`` with this module as the executor."""
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    supervisor.MODULES = {**supervisor.MODULES, Role.EXECUTOR: executor}
    return cli.main()


if __name__ == "__main__":
    if "--parent" in sys.argv:
        run_executor()
    else:
        sys.exit(run_server(__spec__.name))
