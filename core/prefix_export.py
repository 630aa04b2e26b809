"""Prefixes that go into files and come from there, by way of the disk: what was begun, for whom, and how it ended.

An export is one order: write what the disk has of a prefix. An import is two: what does the file have, and then, have these
places hold what is not there already. The executor has the files (`quintet.executor.kv_transfer.disk.prefix_file`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.kv_admin import KvQuery, KvReport
from quintet.wire.kv_disk import FileRequest, FileResult
from quintet.wire.messages import Failed


@dataclass(slots=True)
class _Task:
    query: KvQuery
    report: KvReport
    new: list[bytes] = field(default_factory=list)
    """What an import is to bring."""


class FileTasks:
    """Those of one engine."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._last_id = 0
        self._done: list[tuple[int, KvReport]] = []

    def begin_export(
        self, state: SchedulerState, query: KvQuery, report: KvReport, keys: Sequence[bytes]
    ) -> None:
        """Have these contents written into a file. Raises `RequestError`."""
        disk = _disk_of(state)
        num_there = sum(key in disk.place_of for key in keys)
        if num_there < len(keys):
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"Of the prefix's {len(keys)} blocks {num_there} are on disk, from where they are exported. What was just "
                "computed is there soon: try again. What was evicted, or is larger than the disk, is not: send the prompt "
                "once more.",
                retry_s=1,
            )
        places = pack_i32(disk.place_of[key] for key in keys)
        order = FileRequest(self._take(_Task(query, report)), "export", query.file, places, list(keys))
        disk.file_orders.append(order)

    def begin_import(self, state: SchedulerState, query: KvQuery, report: KvReport) -> None:
        """Have a file's blocks brought to the disk. Raises `RequestError`."""
        disk = _disk_of(state)
        disk.file_orders.append(FileRequest(self._take(_Task(query, report)), "look", query.file))

    def _take(self, task: _Task) -> int:
        self._last_id += 1
        self._tasks[self._last_id] = task
        return self._last_id

    def hear(self, state: SchedulerState | None, answers: Sequence[FileResult]) -> None:
        """Go on with what ended, behind what was told of its blocks."""
        for answer in answers:
            task = self._tasks.pop(answer.task_id, None)
            if task is None:
                continue
            if answer.error:
                if state is not None:
                    _disk_of(state).give_up(task.new)
                self._fail(task, ErrorCode.INVALID, answer.error[:1].upper() + answer.error[1:] + ".")
            elif task.query.verb == "import" and not task.new and state is not None:
                self._bring(_disk_of(state), task, answer)
            else:
                task.report.num_bytes = answer.num_bytes
                task.report.num_damaged = len(answer.keys)
                task.report.num_imported = len(task.new) - len(answer.keys)
                self.tell(task.query, task.report)

    def _bring(self, disk: DiskPool, task: _Task, answer: FileResult) -> None:
        """Have places hold what a file has and the disk lacks, as far as there are places that are not pinned."""
        places = []
        for key in answer.keys:
            if key in disk.place_of or key in disk.storing:
                task.report.num_known += 1
                continue
            place = disk.take_place_for(key)
            if place is None:
                break
            places.append(place)
            task.new.append(key)
        if not task.new:
            self.tell(task.query, task.report)
            return
        order = FileRequest(self._take(task), "import", task.query.file, pack_i32(places), task.new)
        disk.file_orders.append(order)

    def fail_all(self) -> None:
        """Hear that the executor which had them is gone, or has forgotten them."""
        for task in self._tasks.values():
            words = "The executor was replaced meanwhile; try again."
            self._fail(task, ErrorCode.UNAVAILABLE, words)
        self._tasks.clear()

    def _fail(self, task: _Task, code: ErrorCode, words: str) -> None:
        task.report.error = Failed(0, code, words)
        self.tell(task.query, task.report)

    def tell(self, query: KvQuery, report: KvReport) -> None:
        """Have the report of a question told."""
        self._done.append((query.frontend, report))

    def take_done(self) -> list[tuple[int, KvReport]]:
        """Return frontends and what they are to hear, since the last call."""
        done, self._done = self._done, []
        return done


def _disk_of(state: SchedulerState) -> DiskPool:
    disk = state.pool.tiers.disk
    if disk is None:
        raise RequestError(
            ErrorCode.INVALID,
            "Prefixes go into files and come from there by way of --kv-disk: start the server with it.",
        )
    return disk
