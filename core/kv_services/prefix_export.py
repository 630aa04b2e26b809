"""Export and import of prefixes as files, through the disk tier.

An export reads blocks on disk; an import adds the missing ones. The executor handles the files
(`quintet.executor.kv_transfer.disk.prefix_file`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.core.kv.tier import Tier
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.kv_admin import KvQuery, KvReport
from quintet.wire.kv_tiers import FileRequest, FileResult
from quintet.wire.messages import Failed


@dataclass(slots=True)
class _Task:
    query: KvQuery
    report: KvReport
    new: list[bytes] = field(default_factory=list)
    """Keys that an import adds."""


class FileTasks:
    """File tasks of one engine."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._last_id = 0
        self.done: list[tuple[int, KvReport]] = []
        """Pairs of frontend and report that were not sent yet."""

    def begin_export(
        self, state: SchedulerState, query: KvQuery, report: KvReport, keys: Sequence[bytes]
    ) -> None:
        """Write these contents into a file. Raises `RequestError`."""
        disk = _disk_of(state)
        num_on_disk = sum(key in disk.held for key in keys)
        if num_on_disk < len(keys):
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"Only {num_on_disk} of the prefix's {len(keys)} blocks are on disk, and exports read the disk. Blocks computed "
                "just now are stored soon: retry. If blocks were evicted, send the prompt again. A prefix larger than the "
                "disk cannot be exported.",
                retry_s=1,
            )
        task_id = self._take(_Task(query, report))
        disk.file_requests.append(FileRequest(task_id, "export", query.file, list(keys)))

    def begin_import(self, state: SchedulerState, query: KvQuery, report: KvReport) -> None:
        """Import a file's blocks to the disk. Raises `RequestError`."""
        disk = _disk_of(state)
        disk.file_requests.append(FileRequest(self._take(_Task(query, report)), "look", query.file))

    def _take(self, task: _Task) -> int:
        self._last_id += 1
        self._tasks[self._last_id] = task
        return self._last_id

    def apply(self, state: SchedulerState, answers: Sequence[FileResult]) -> None:
        """Continue tasks with these results, after the results for their blocks."""
        for answer in answers:
            task = self._tasks.pop(answer.task_id, None)
            if task is None:
                continue
            if answer.error:
                _disk_of(state).give_up(task.new)
                self._fail(task, ErrorCode.INVALID, answer.error[:1].upper() + answer.error[1:] + ".")
            elif task.query.verb == "import" and not task.new:
                self._bring(_disk_of(state), task, answer)
            else:
                task.report.num_bytes = answer.num_bytes
                task.report.num_damaged = len(answer.keys)
                task.report.num_imported = len(task.new) - len(answer.keys)
                self.done.append((task.query.frontend, task.report))

    def _bring(self, disk: Tier, task: _Task, answer: FileResult) -> None:
        """Reserve space for the file's blocks that are not on disk, while some is left or not pinned."""
        for key in answer.keys:
            if key in disk.held or key in disk.storing:
                task.report.num_known += 1
            elif disk.reserve(key):
                task.new.append(key)
            else:
                break
        if not task.new:
            self.done.append((task.query.frontend, task.report))
            return
        disk.file_requests.append(FileRequest(self._take(task), "import", task.query.file, task.new))

    def fail_all(self) -> None:
        """Fail all tasks: their executor was replaced or has emptied its tables."""
        for task in self._tasks.values():
            words = "The executor was replaced during the operation; retry."
            self._fail(task, ErrorCode.UNAVAILABLE, words)
        self._tasks.clear()

    def _fail(self, task: _Task, code: ErrorCode, words: str) -> None:
        task.report.error = Failed(0, code, words)
        self.done.append((task.query.frontend, task.report))

    def take_done(self) -> list[tuple[int, KvReport]]:
        done, self.done = self.done, []
        return done


def _disk_of(state: SchedulerState) -> Tier:
    disk = next((tier for tier in state.pool.tiers.remote if tier.capacity.num_places), None)
    if disk is None:
        raise invalid("Prefix export and import need the disk tier; start the server with --kv-disk.")
    return disk
