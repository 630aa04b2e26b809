"""Where the time of a process goes: spans on the clock that all processes of a machine share.

Owns the ring into which a process records, and the file it is written to (Chrome's trace format, which
https://ui.perfetto.dev and chrome://tracing show). Knows nothing of what the spans mean to each other: that is
``deploy/cli/trace.py``.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from quintet.wire.ids import Role, WorkerId

log = logging.getLogger("quintet")

SPANS: Mapping[str, tuple[str, str]] = {
    "encode": ("bytes", "tokenizer: a prompt became ids"),
    "admit": ("prompt_bytes", "core: a request was queued"),
    "plan": ("step", "core: the step was decided"),
    "commit": ("step", "core: the step's tokens were applied"),
    "send": ("step", "core, executor: a message was encoded and queued"),
    "wait": ("step", "executor: nothing to do before this step (before the first: boot)"),
    "chores": (
        "step",
        "executor: weights moved to huge pages, or experts to other ranks, though plans were there",
    ),
    "tables": ("step", "executor: the plan was applied to the slot tables"),
    "arrays": ("step", "executor: the addresses and rotations that the program reads"),
    "layers": ("step", "executor: the model up to its last layer"),
    "logits": ("step", "executor: the output layer, for rows that draw"),
    "bubble": (
        "step",
        "executor of several stages: nothing to do before the logits of this step, or before the next stage has room for it",
    ),
    "told": (
        "step",
        "another rank: any other order than a run was carried out (blocks copied, chores done); on a GPU, launched",
    ),
    "device": ("step", "executor: the device computed, beside the loop"),
    "sampling": ("step", "executor: tokens were drawn and written into the token table"),
    "detokenize": ("step", "detokenizer: the step's tokens became text, and the text was sent"),
    "text": ("step", "frontend: the step's text was handed to its streams"),
    "events": (
        "streams",
        "frontend: one client's events were composed and written; waits for a client that reads slowly",
    ),
}
"""Every span there is: what its number counts, and what happens in it.

Ranks and stages that are not the first have `wait`, `layers` (with the logits), `bubble` and `told`. They know no plans: their
steps are the runs that they were told of, counted from 1.
"""

CAPACITY = 1 << 16
"""Spans a process remembers: minutes of decoding. Older ones are overwritten."""

SUFFIX = ".trace.json"
WRITE_NOW = signal.SIGUSR1
"""A traced process that gets this signal writes its file and goes on."""

_RECORD = struct.Struct("=qqqq")
_NAMES = tuple(SPANS)
_INDEXES = {name: index for index, name in enumerate(_NAMES)}
_ROLES = list(Role)


class Span(Protocol):
    """Records one span. Without ``begin_ns`` it began where the span before ended; without ``end_ns`` it ends now.

    Without ``number`` it has that of the span before. Times are `time.monotonic_ns`.
    """

    def __call__(
        self, name: str, number: int | None = None, begin_ns: int | None = None, end_ns: int | None = None, /
    ) -> None: ...


def no_span(
    name: str, number: int | None = None, begin_ns: int | None = None, end_ns: int | None = None, /
) -> None:
    """Record nothing: the `Span` of a process that is not traced."""


class Event(msgspec.Struct, frozen=True):
    """One entry of a trace file. Times in microseconds."""

    name: str
    ph: str
    """``X`` is a span, ``M`` says something of the process."""
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, int | str] = {}


class Trace(msgspec.Struct, frozen=True):
    """A trace file: of one process, or of several merged."""

    traceEvents: list[Event]
    displayTimeUnit: str = "ms"


class Tracer:
    """The ring of one process. `span` may be called from any thread; only the loop's may leave ``begin_ns`` out."""

    def __init__(
        self, worker: WorkerId, folder: str | Path, capacity: int = CAPACITY, part: str = ""
    ) -> None:
        """part: of a slot that several processes fill, in words which of them this one is."""
        self._worker, self._part = worker, part
        self._folder = Path(folder)
        self._capacity = capacity
        self._ring = bytearray(_RECORD.size * capacity)
        self._take = itertools.count().__next__
        self._num_recorded = 0
        self._last_ns = time.monotonic_ns()
        self._number = 0

    def span(
        self, name: str, number: int | None = None, begin_ns: int | None = None, end_ns: int | None = None, /
    ) -> None:
        """See `Span`."""
        if end_ns is None:
            end_ns = time.monotonic_ns()
        if begin_ns is None:
            begin_ns = self._last_ns
        if number is None:
            number = self._number
        position = self._take()
        _RECORD.pack_into(
            self._ring,
            position % self._capacity * _RECORD.size,
            _INDEXES[name],
            number,
            begin_ns,
            end_ns,
        )
        self._num_recorded = position + 1
        self._last_ns = end_ns
        self._number = number

    def spans(self) -> list[tuple[str, int, int, int]]:
        """Return ``(name, number, begin_ns, end_ns)`` of what the ring holds, in the order of recording."""
        num = self._num_recorded
        records = list(_RECORD.iter_unpack(self._ring))
        if num > self._capacity:
            oldest = num % self._capacity
            records = records[oldest:] + records[:oldest]
        return [(_NAMES[index], number, begin, end) for index, number, begin, end in records[:num]]

    def write(self) -> Path:
        """Write the file of this process, whole or not at all, and return where."""
        worker, pid = self._worker, os.getpid()
        title = f"{worker.role}-{worker.index} {self._part}".rstrip()
        events = [
            Event("process_name", "M", pid, args={"name": title}),
            Event("process_sort_index", "M", pid, args={"sort_index": _ROLES.index(worker.role)}),
        ]
        for name, number, begin, end in self.spans():
            events.append(
                Event(name, "X", pid, 0, begin / 1e3, (end - begin) / 1e3, {SPANS[name][0]: number})
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        part = f".{self._part}".replace(" ", "-") * bool(self._part)
        path = self._folder / f"{worker}{part}{SUFFIX}"
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(Trace(events)))
        unfinished.replace(path)
        return path

    def try_to_write(self) -> None:
        """Write the file, or say why not in the log: a process does not end of its trace."""
        try:
            self.write()
        except OSError as error:
            log.warning("the trace of this process cannot be written: %s", error)

    def write_on_signal(self) -> None:
        """Have `WRITE_NOW` write the file. Only the main thread can arrange that; tests play processes in others."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(WRITE_NOW, lambda number, frame: self.try_to_write())

    def write_beside(self) -> None:
        """Have a thread write the file on `WRITE_NOW`, and on SIGTERM write it and end the process.

        For a process whose main thread, which calls this, waits where Python handles no signals: what the interpreter's handler
        writes into a pipe needs no thread that comes back. No signal is blocked, for children would inherit that.
        """
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        for number in (WRITE_NOW, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
        threading.Thread(target=self._write_at, args=(heard,), name="trace", daemon=True).start()

    def _write_at(self, heard: int) -> None:
        while numbers := os.read(heard, 64):
            if WRITE_NOW in numbers or signal.SIGTERM in numbers:
                self.try_to_write()
            if signal.SIGTERM in numbers:
                os._exit(0)


def read_trace(path: Path) -> Trace:
    """Read a file that `Tracer.write` or `merge` wrote. Raises `msgspec.MsgspecError` when it is none."""
    return msgspec.json.decode(path.read_bytes(), type=Trace)


def merge(traces: Iterable[Trace]) -> Trace:
    """Put the traces of several processes of one machine into one."""
    return Trace([event for trace in traces for event in trace.traceEvents])
