"""Trace spans of a process, on the monotonic clock of the machine.

It owns the ring buffer and the trace file (Chrome's trace format, shown by https://ui.perfetto.dev and
chrome://tracing). ``deploy/cli/trace.py`` analyses and merges the files.
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

import msgspec

from quintet.wire.ids import Role, WorkerId

log = logging.getLogger("quintet")

SPANS: Mapping[str, tuple[str, str]] = {
    "encode": ("bytes", "tokenizer: encode a prompt"),
    "admit": ("prompt_bytes", "core: queue a request"),
    "plan": ("step", "core: plan the step"),
    "commit": ("step", "core: commit the step's tokens"),
    "send": ("step", "core, executor: encode and queue a message"),
    "wait": ("step", "executor: idle before this step (before the first: startup)"),
    "idle_tasks": (
        "step",
        "executor: move weights to huge pages, or experts to other ranks, while plans wait",
    ),
    "tables": ("step", "executor: apply the plan to the slot tables"),
    "arrays": ("step", "executor: compute the addresses and rotations that the program reads"),
    "layers": ("step", "executor: compute the model up to its last layer"),
    "logits": ("step", "executor: compute the output layer, for rows that draw"),
    "bubble": (
        "step",
        "executor with pipeline stages: wait for the logits of this step, or for the next stage",
    ),
    "orders": (
        "step",
        "another rank: execute a command other than a step (copy blocks, idle tasks); on a GPU, launch it",
    ),
    "device": ("step", "executor: device time, parallel to the loop"),
    "sampling": ("step", "executor: draw tokens and write them into the token table"),
    "detokenize": ("step", "detokenizer: decode the step's tokens and send the text"),
    "text": ("step", "frontend: pass the step's text to its streams"),
    "events": (
        "streams",
        "frontend: compose and write one client's events; includes waits for a slow client",
    ),
}
"""All spans: the meaning of their number, and the measured work.

Ranks and stages other than the first have `wait`, `layers` (with the logits), `bubble` and `orders`. They have no
plans: their steps are the runs that they received, counted from 1.
"""

CAPACITY = 1 << 16
"""Spans in the ring: minutes of decode. Older ones are overwritten."""

SUFFIX = ".trace.json"
WRITE_NOW = signal.SIGUSR1
"""A traced process that gets this signal writes its file and continues."""

_RECORD = struct.Struct("=qqqq")
_NAMES = tuple(SPANS)
_INDEXES = {name: index for index, name in enumerate(_NAMES)}
_ROLES = list(Role)


class Event(msgspec.Struct, frozen=True):
    """One entry of a trace file. Times in microseconds."""

    name: str
    ph: str
    """``X`` is a span, ``M`` is process metadata."""
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
    """Ring of one process. Any thread may call `span`; only the loop's thread may omit ``begin_ns``."""

    def __init__(
        self, worker: WorkerId, folder: str | Path, capacity: int = CAPACITY, part: str = ""
    ) -> None:
        """part: distinguishes the processes of a slot that has several."""
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
        """See `quintet.process.spans.TraceSpan`."""
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
        """Return ``(name, number, begin_ns, end_ns)`` of the spans in the ring, in the order of recording."""
        num = self._num_recorded
        records = list(_RECORD.iter_unpack(self._ring))
        if num > self._capacity:
            oldest = num % self._capacity
            records = records[oldest:] + records[:oldest]
        return [(_NAMES[index], number, begin, end) for index, number, begin, end in records[:num]]

    def write(self) -> Path:
        """Write this process's file atomically and return its path."""
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
        """Write the file, or log the error: tracing must not end a process."""
        try:
            self.write()
        except OSError as error:
            log.warning("cannot write the trace of this process: %s", error)

    def write_on_signal(self) -> None:
        """Write the file on `WRITE_NOW`. Only the main thread can install the handler; tests run processes in other threads."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(WRITE_NOW, lambda number, frame: self.try_to_write())

    def write_in_thread(self) -> None:
        """Start a thread that writes the file on `WRITE_NOW`, and on SIGTERM writes it and ends the process.

        Called by the main thread, if that then blocks where Python handles no signals. The interpreter's signal
        handler writes to a pipe without that thread. No signal is blocked, because children would inherit that.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (WRITE_NOW, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
        threading.Thread(target=self._write_at, args=(read_end,), name="trace", daemon=True).start()

    def _write_at(self, read_end: int) -> None:
        while numbers := os.read(read_end, 64):
            if WRITE_NOW in numbers or signal.SIGTERM in numbers:
                self.try_to_write()
            if signal.SIGTERM in numbers:
                os._exit(0)


def read_trace(path: Path) -> Trace:
    """Read a file written by `Tracer.write` or `merge`. Raises `msgspec.MsgspecError` for another file."""
    return msgspec.json.decode(path.read_bytes(), type=Trace)


def merge(traces: Iterable[Trace]) -> Trace:
    """Merge the traces of several processes of one machine."""
    return Trace([event for trace in traces for event in trace.traceEvents])
