"""Journal of the work that a process computes. It survives the process, so others find the request that ended it.

A file in the run folder, mapped into memory: an entry is two integers, written before the work and erased after it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from pathlib import Path
from typing import NamedTuple

from quintet.process.own_files import open_own
from quintet.wire.ids import WorkerId

MAX_ENTRIES = 8
"""Concurrent pieces of work: one in the event loop, the others in threads."""
ENTRY = struct.Struct("=qq")
NUM_BYTES = MAX_ENTRIES * ENTRY.size
REQUEST = 0
"""Asker of a request: its id is unique in the server."""

Journal = deque[memoryview]
"""Free entries, each of two integers."""


class WorkId(NamedTuple):
    """One piece of work."""

    asker: int
    """`REQUEST`, or 1 plus the index of the frontend that numbered the query."""
    number: int
    """Id of the request or query; positive."""

    def __str__(self) -> str:
        """Return the work's name in log lines."""
        return f"request {self.number}" if self.asker == REQUEST else f"query {self.number}"


def open_journal(run_dir: str, me: WorkerId) -> mmap.mmap:
    """Create the journal of this process in the run folder."""
    file = open_own(str(_path(run_dir, me)), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(file, bytes(NUM_BYTES))
        return mmap.mmap(file, NUM_BYTES)
    finally:
        os.close(file)


def entries_of(journal: mmap.mmap | bytearray) -> Journal:
    """Return the free entries of a journal.

    Pop an entry, write a `WorkId` to it, and after the work write 0 to its number and append it again. Thread-safe.
    """
    whole = memoryview(journal).cast("q")
    return deque(whole[2 * i : 2 * i + 2] for i in range(MAX_ENTRIES))


def work_at_death(run_dir: str, worker: WorkerId) -> frozenset[WorkId]:
    """Return the work that a dead process did not finish; empty without a journal."""
    try:
        written = _path(run_dir, worker).read_bytes()
    except OSError:
        return frozenset()
    whole = len(written) // ENTRY.size * ENTRY.size
    return frozenset(WorkId(*entry) for entry in ENTRY.iter_unpack(written[:whole]) if entry[1])


def _path(run_dir: str, worker: WorkerId) -> Path:
    return Path(run_dir) / f"{worker}.work"
