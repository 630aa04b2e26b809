"""Flight recorder: a process's received and sent frames, with times, in a bounded ring of files.

    FOLDER/core-0.1/0001.rec    header | turn: clock, frames taken together | frames sent | turn ...
                    0002.rec

It owns the file format, for writing and reading. It interprets no frames except the newest topology, which every
segment repeats. A thread writes, so the recorded process never waits.
"""

from __future__ import annotations

import logging
import queue
import re
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId

MAGIC = b"quintet recording 1\n"
SUFFIX = ".rec"
SEGMENTS = 16
"""Files in a full ring; one of them is deleted at a time."""
FLUSH_BYTES = 256 << 10
FLUSH_S = 0.5
"""Flush limits: younger data is lost when the process is killed."""
MAX_BACKLOG_BYTES = 64 << 20
"""Maximum unwritten bytes; a slower disk ends the recording, because one with a gap cannot be replayed."""

_HEAD = struct.Struct("<BIq")
"""Kind of a record, bytes that follow, and a number: an iteration's clock, or the receiver of a frame."""
_SIZE = struct.Struct("<I")
_ITERATION, _IDLE_ITERATION, _RECEIVED, _SENT = 1, 2, 3, 4
_ROLES = list(Role)


class RecordHeader(msgspec.Struct, frozen=True):
    """Header of every segment."""

    version: str
    """Version of Quintet."""
    worker: WorkerId
    segment: int
    """From 1."""
    topology: bytes
    """The newest `Topology` before the segment, encoded; empty when there was none."""
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Sent:
    """A frame that the process sent."""

    role: Role
    index: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LoopIteration:
    """One iteration of the process's loop."""

    number: int
    """From 1, among the iterations read."""
    now_ns: int
    was_idle: bool
    """True when nothing was pending at its start."""
    frames: list[bytes] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)


class RecordingError(Exception):
    """A recording cannot be read; the message names the file and the error."""


class Recorder:
    """Writes the recording of one process. Used from its loop only, except `sent`, which any thread may call."""

    def __init__(self, me: WorkerId, config: EngineConfig) -> None:
        assert config.record is not None
        self._ring = _Ring(me, config, Path(config.record))
        self._parts: list[bytes | memoryview] = []
        self._num_bytes = 0
        self._flushed_at = time.monotonic()
        self._taken: list[memoryview] = []
        self.topology = b""
        """The newest, encoded."""

    def received(self, payload: memoryview) -> None:
        """Record an accepted frame; it belongs to the iteration that begins next."""
        self._taken.append(payload)

    def begin_iteration(self, now_ns: int, was_idle: bool) -> None:
        """Begin an iteration with the frames received."""
        self.flush()
        add, num_bytes = self._parts.append, 0
        add(_HEAD.pack(_IDLE_ITERATION if was_idle else _ITERATION, 0, now_ns))
        for payload in self._taken:
            size = len(payload)
            add(_HEAD.pack(_RECEIVED, size, 0))
            add(payload)
            num_bytes += size + _HEAD.size
        self._taken.clear()
        self._num_bytes += num_bytes + _HEAD.size

    def sent(self, worker: WorkerId, payload: bytes) -> None:
        """Record a frame that was sent, unless to the supervisor, which gets times and counts only."""
        if worker.role is Role.SUPERVISOR:
            return
        head = _HEAD.pack(_SENT, len(payload), _ROLES.index(worker.role) << 32 | worker.index)
        self._parts += (head, payload)
        self._num_bytes += len(payload) + _HEAD.size

    def flush(self) -> None:
        """Write the recorded frames if they are many or old. Only between iterations."""
        if self._num_bytes > FLUSH_BYTES or time.monotonic() - self._flushed_at > FLUSH_S:
            self._write_out()

    def _write_out(self) -> None:
        if self._parts:
            self._ring.put(self._parts, self._num_bytes, self.topology)
            self._parts, self._num_bytes = [], 0
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self._write_out()
        self._ring.close()


def without_secrets(config: EngineConfig) -> EngineConfig:
    """Return a configuration without keys, and without the credentials in URLs."""
    replace, store = msgspec.structs.replace, config.cache.store
    if store is not None:
        store = replace(store, url=re.sub(r"(?<=//)[^/]*@", "", store.url))
    frontend = replace(config.frontend, api_keys=[], admin_key="")
    return replace(config, frontend=frontend, cache=replace(config.cache, store=store))


class _Ring:
    """Segments of one slot, and the thread that writes them. The oldest are deleted, those of earlier epochs first."""

    def __init__(self, me: WorkerId, config: EngineConfig, folder: Path) -> None:
        self._me = me
        self._config = without_secrets(config)
        self._folder = folder
        self._max_bytes = config.record_bytes
        self._segment = 0
        self._file: BinaryIO | None = None
        self._waiting: queue.SimpleQueue[tuple[list[bytes | memoryview], int, bytes] | None] = (
            queue.SimpleQueue()
        )
        self._num_put = self._num_written = 0
        """Bytes; each counter is written by one thread only."""
        self._has_ended = False
        self._log = logging.getLogger("quintet")
        self._own_folder = folder / str(me)
        self._own_folder.mkdir(mode=0o700, parents=True)
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def put(self, parts: list[bytes | memoryview], num_bytes: int, topology: bytes) -> None:
        """Queue complete iterations for writing."""
        if self._has_ended:
            return
        if self._num_put - self._num_written > MAX_BACKLOG_BYTES:
            self._give_up(f"more than {MAX_BACKLOG_BYTES >> 20} MiB are unwritten: the disk is too slow")
            return
        self._num_put += num_bytes
        self._waiting.put((parts, num_bytes, topology))

    def close(self) -> None:
        """Wait until everything is written."""
        self._waiting.put(None)
        self._thread.join(5.0)

    def _write_all(self) -> None:
        while (work := self._waiting.get()) is not None:
            parts, num_bytes, topology = work
            if self._has_ended:
                continue
            try:
                self._segment_for(num_bytes, topology).write(b"".join(parts))
            except OSError as error:
                self._give_up(str(error))
            self._num_written += num_bytes
        if self._file is not None:
            self._file.close()

    def _give_up(self, why: str) -> None:
        self._has_ended = True
        self._log.error("recording ends: %s", why)

    def _segment_for(self, num_bytes: int, topology: bytes) -> BinaryIO:
        """Return the current file, or a new one when it is full."""
        from importlib.metadata import version  # thirty modules that only a server that records needs

        if self._file is not None:
            if self._file.tell() + num_bytes <= self._max_bytes // SEGMENTS:
                return self._file
            self._file.close()
        self._segment += 1
        _delete_oldest(self._folder, self._me, self._max_bytes - self._max_bytes // SEGMENTS)
        path = self._own_folder / f"{self._segment:04d}{SUFFIX}"
        header = msgspec.json.encode(
            RecordHeader(version("quintet"), self._me, self._segment, topology, self._config)
        )
        path.touch(mode=0o600)
        self._file = path.open("wb", buffering=0)
        self._file.write(MAGIC + _SIZE.pack(len(header)) + header)
        return self._file


def _delete_oldest(folder: Path, me: WorkerId, max_bytes: int) -> None:
    """Delete the oldest segments of a slot until the rest has at most ``max_bytes``."""
    segments = [
        (int(path.parent.name.rpartition(".")[2]), int(path.stem), path)
        for path in folder.glob(f"{me.role}-{me.index}.*/*{SUFFIX}")
    ]
    segments.sort()
    sizes = [path.stat().st_size for _, _, path in segments]
    total = sum(sizes)
    for (_, _, path), size in zip(segments, sizes, strict=True):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
        if path.parent.name != str(me) and not any(path.parent.iterdir()):
            path.parent.rmdir()


@dataclass(frozen=True, slots=True)
class Recording:
    """Available part of one process's recording."""

    header: RecordHeader
    """Header of the oldest segment."""
    segments: list[Path]

    @property
    def is_whole(self) -> bool:
        """True when it starts at the start of the process."""
        return self.header.segment == 1

    def turns(self) -> Iterator[LoopIteration]:
        """Read the iterations. The last one may lack sent frames; a truncated record is ignored."""
        turn: LoopIteration | None = None
        for path in self.segments:
            for kind, number, payload in _records(path):
                if kind in (_ITERATION, _IDLE_ITERATION):
                    if turn is not None:
                        yield turn
                    turn = LoopIteration(
                        1 if turn is None else turn.number + 1, number, kind == _IDLE_ITERATION
                    )
                elif turn is None:
                    continue  # sent late, by a thread, for an iteration that was deleted
                elif kind == _RECEIVED:
                    turn.frames.append(payload)
                else:
                    turn.sent.append(Sent(_ROLES[number >> 32], number & 0xFFFFFFFF, payload))
        if turn is not None:
            yield turn


def open_recording(folder: Path, worker: str) -> Recording:
    """Find the recording of ``worker`` (``core-0.1``). Raises `RecordingError` with the available ones."""
    paths = sorted((folder / worker).glob(f"*{SUFFIX}"), key=lambda path: int(path.stem))
    if not paths:
        known = sorted({path.parent.name for path in folder.glob(f"*/*{SUFFIX}")})
        available = f"it has {', '.join(known)}" if known else "it has no recording"
        raise RecordingError(f"{folder} has no recording of {worker!r}; {available}.")
    numbers = [int(path.stem) for path in paths]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RecordingError(f"{folder / worker}: segments are missing; present are {numbers}")
    return Recording(_header(paths[0])[0], paths)


def _header(path: Path) -> tuple[RecordHeader, int]:
    """Return a segment's header and the offset of its records."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{path}: not a recording of this version of Quintet")
        (size,) = _SIZE.unpack(file.read(_SIZE.size))
        try:
            return msgspec.json.decode(file.read(size), type=RecordHeader), file.tell()
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{path}: cannot read its header: {error}") from error


def _records(path: Path) -> Iterator[tuple[int, int, bytes]]:
    with path.open("rb") as file:
        file.seek(_header(path)[1])
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, size, number = _HEAD.unpack(head)
            payload = file.read(size)
            if len(payload) < size:
                return
            if not _ITERATION <= kind <= _SENT:
                raise RecordingError(f"{path}: invalid record at byte {file.tell() - size}")
            yield kind, number, payload
