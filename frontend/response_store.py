"""Store of responses (input, output, events of background ones) and conversations.

One SQLite file, in the run folder unless --response-store names another. All frontends share it, so that a stored response
survives the frontend that wrote it. Each frontend uses it on a thread of its own and opens it on first use.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import SlotState, Topology

FILE = "responses.sqlite"
WAIT_S = 10.0
"""SQLite busy timeout: maximum wait for another frontend's write."""
OPEN_TRIES, OPEN_PAUSE_S = 20, 0.05
MAX_CHAIN = 1000
"""Maximum responses in one chain of previous_response_id."""
ROWS_PER_QUERY = 64
"""Rows per query."""
QUEUED, IN_PROGRESS = "queued", "in_progress"
CONVERSATION = "conversation"
"""Status of conversations, which share the table with responses."""
_OPEN = f"status IN ('{QUEUED}', '{IN_PROGRESS}')"
VERSION = 1
"""Schema version; a file of another version is rejected."""
_TABLES = f"""
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, num_owners INTEGER NOT NULL, status TEXT NOT NULL, background INTEGER NOT NULL,
    streams INTEGER NOT NULL, previous TEXT, items BLOB NOT NULL, answer BLOB NOT NULL, request BLOB NOT NULL,
    stream TEXT NOT NULL, response BLOB NOT NULL, used_at REAL NOT NULL, num_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used_at);
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, number INTEGER NOT NULL, position TEXT NOT NULL,
    frames BLOB NOT NULL, PRIMARY KEY (id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held (
    one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);
INSERT OR IGNORE INTO held VALUES (1, 0, 0);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON responses BEGIN
    UPDATE held SET entries = entries + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS grew AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE held SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON responses BEGIN
    UPDATE held SET entries = entries - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
PRAGMA user_version = {VERSION};
"""
_ResultT = TypeVar("_ResultT")


@dataclass(slots=True)
class Record:
    """A stored response."""

    id: str
    owner: str
    """Frontend that answers it: see `ResponseStore.owner`."""
    status: str
    background: bool
    streams: bool
    """True if its events are stored."""
    previous: str | None
    """Id of the previous response."""
    items: bytes
    """JSON array of its input items, without those of previous responses."""
    answer: bytes
    """Event format; opaque, read by the API."""
    request: bytes = b""
    """Request to the engine; opaque, read by the API."""
    stream: str = ""
    """Its stream, as `StreamId` formats it; empty before the request is sent."""
    response: bytes = b""
    """JSON object: the whole response, after it ended."""
    num_owners: int = 1
    """Number of frontends that have answered it, in turn."""

    @property
    def is_open(self) -> bool:
        return self.status in (QUEUED, IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Events:
    """Events that were written in one transaction."""

    number: int
    """Number of the last event."""
    position: str
    """Writer's cursor after them."""
    frames: bytes


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """Items that a response adds to a conversation when it ends."""

    conversation_id: str
    join: Callable[[Record, Record], None]
    """Updates the conversation's record from the response's."""


_COLUMNS = (
    "id, owner, status, background, streams, previous, items, answer, request, stream, response, num_owners"
)


class ResponseFile:
    """The database file. All calls run on one thread."""

    def __init__(self, path: Path, limits: FrontendConfig) -> None:
        self._limits = limits
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = sqlite3.connect(path, timeout=WAIT_S, isolation_level="IMMEDIATE")
        # A store in the run folder need not survive a power loss.
        synchronous = "NORMAL" if limits.response_store else "OFF"
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"{path} was made by another version; set another --response-store")
        for is_last in (*[False] * OPEN_TRIES, True):
            try:
                self._db.executescript(
                    f"PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous}; PRAGMA foreign_keys = ON; {_TABLES}"
                )
                return
            except sqlite3.OperationalError:  # SQLite does not wait while another frontend creates the file
                if is_last:
                    raise
                time.sleep(OPEN_PAUSE_S)

    def insert(self, record: Record) -> None:
        """Insert a new response, and delete the least recently used above the limits."""
        num_bytes = len(record.items) + len(record.answer)
        values = [getattr(record, name) for name in _COLUMNS.split(", ")]
        with self._db:
            marks = ", ".join("?" * (len(values) + 2))
            self._db.execute(
                f"INSERT INTO responses ({_COLUMNS}, used_at, num_bytes) VALUES ({marks})",
                (*values, time.time(), num_bytes),
            )
            self._drop_excess()

    def _drop_excess(self) -> None:
        oldest = time.time() - 3600 * self._limits.response_store_hours
        self._db.execute(f"DELETE FROM responses WHERE used_at < ? AND NOT {_OPEN}", (oldest,))
        while True:
            count, num_bytes = self._db.execute("SELECT entries, num_bytes FROM held").fetchone()
            too_many = count - self._limits.response_store_entries
            too_large = num_bytes - self._limits.response_store_bytes
            if too_many <= 0 and too_large <= 0:
                return
            ended = self._db.execute(
                f"SELECT id, num_bytes FROM responses WHERE NOT {_OPEN} ORDER BY used_at LIMIT {ROWS_PER_QUERY}"
            ).fetchall()
            if not ended:
                return
            for response_id, size in ended:
                if too_many > 0 or too_large > 0:
                    self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                too_many, too_large = too_many - 1, too_large - size

    def note_request(self, response_id: str, stream: str, request: bytes) -> None:
        """Store the request to the engine and its stream id."""
        with self._db:
            self._db.execute(
                "UPDATE responses SET stream = ?, request = ?, num_bytes = num_bytes + ? - LENGTH(request) WHERE id = ?",
                (stream, request, len(request), response_id),
            )

    def write_progress(
        self,
        response_id: str,
        owner: str,
        status: str,
        events: Events | None = None,
        response: bytes = b"",
        turn: ConversationTurn | None = None,
    ) -> bool:
        """Store the progress of a response that ``owner`` answers: events, and the whole response at its end.

        Return False if it was cancelled, deleted, or has another owner.
        """
        size = len(response) + (0 if events is None else len(events.frames))
        with self._db:
            updated = self._db.execute(
                "UPDATE responses SET status = ?, response = ?, num_bytes = num_bytes + ? "
                f"WHERE id = ? AND owner = ? AND {_OPEN}",
                (status, response, size, response_id, owner),
            )
            if updated.rowcount and events is not None:
                self._db.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?)",
                    (response_id, events.number, events.position, events.frames),
                )
            if updated.rowcount and status not in (QUEUED, IN_PROGRESS):
                self._end(response_id, turn)
        return updated.rowcount > 0

    def finish(
        self,
        response_id: str,
        status: str,
        response: bytes,
        is_open: bool,
        turn: ConversationTurn | None = None,
    ) -> bool:
        """Store the end of a response unless (``is_open``) it has ended; return whether it was stored."""
        unless = f" AND {_OPEN}" if is_open else ""
        with self._db:
            noted = self._db.execute(
                "UPDATE responses SET status = ?, response = ?, num_bytes = num_bytes + ? - LENGTH(response) WHERE id = ?"
                + unless,
                (status, response, len(response), response_id),
            )
            if noted.rowcount:
                self._end(response_id, turn)
        return noted.rowcount > 0

    def _end(self, response_id: str, turn: ConversationTurn | None) -> None:
        """Delete the engine request of an ended response, and append its items to its conversation.

        One response may take a conversation above the size limit, so that it is not lost; later ones are not appended.
        """
        self._db.execute(
            "UPDATE responses SET num_bytes = num_bytes - LENGTH(request), request = x'' WHERE id = ?",
            (response_id,),
        )
        if turn is None:
            return
        response, record = self.find(response_id), self.find(turn.conversation_id)
        if response is None or record is None or len(record.items) > self._limits.max_body_bytes:
            return
        turn.join(record, response)
        self._write(record)
        self._drop_excess()

    def rewrite(self, conversation_id: str, change: Callable[[Record], None]) -> Record | None:
        """Update a conversation's record in a transaction and return it; None if it does not exist."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            record = self.find(conversation_id)
            if record is None or record.status != CONVERSATION:
                return None
            former = len(record.items)
            change(record)
            # A change that shrinks an oversized record is allowed.
            if len(record.items) > max(former, self._limits.max_body_bytes):
                raise self._too_large(conversation_id, len(record.items), "items")
            self._write(record)
            self._drop_excess()
        return record

    def _write(self, record: Record) -> None:
        size = len(record.items) + len(record.answer)
        self._db.execute(
            "UPDATE responses SET items = ?, answer = ?, used_at = ?, num_bytes = ? WHERE id = ?",
            (record.items, record.answer, time.time(), size, record.id),
        )

    def _too_large(self, response_id: str, size: int, param: str) -> RequestError:
        return RequestError(
            ErrorCode.TOO_LARGE,
            f"The conversation of {response_id} has {size} bytes; the limit is "
            f"{self._limits.max_body_bytes}. Start a new one, or raise --max-body-bytes.",
            param,
        )

    def find(self, response_id: str) -> Record | None:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM responses WHERE id = ?", (response_id,)).fetchall()
        return Record(*rows[0]) if rows else None

    def conversation(self, response_id: str) -> list[Record]:
        """Return a response and all previous ones, oldest first, and mark them as used.

        Raises `RequestError` if they exceed the maximum body size.
        """
        rows = self._db.execute(
            "WITH RECURSIVE turn(depth, id, previous, size) AS ("
            "SELECT 0, id, previous, LENGTH(items) + LENGTH(response) FROM responses WHERE id = ? "
            "UNION ALL SELECT depth + 1, r.id, r.previous, LENGTH(r.items) + LENGTH(r.response) "
            f"FROM responses r JOIN turn ON r.id = turn.previous WHERE depth < {MAX_CHAIN}) "
            "SELECT id, size FROM turn ORDER BY depth DESC",
            (response_id,),
        ).fetchall()
        size = sum(row[1] for row in rows)
        if size > self._limits.max_body_bytes:
            raise self._too_large(response_id, size, "previous_response_id")
        now = time.time()
        with self._db:
            self._db.executemany(
                "UPDATE responses SET used_at = ? WHERE id = ?", [(now, row[0]) for row in rows]
            )
        found = [self.find(row[0]) for row in rows]
        return [record for record in found if record is not None]

    def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it existed."""
        with self._db:
            return self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def read_events(self, response_id: str, first: int) -> tuple[str, list[Events]]:
        """Return a response's status ("" if deleted) and its next events, from number ``first``.

        The batch that holds ``first`` is returned whole, so it may begin earlier.
        """
        rows = self._db.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchall()
        events = self._db.execute(
            f"SELECT number, position, frames FROM events WHERE id = ? AND number >= ? ORDER BY number LIMIT {ROWS_PER_QUERY}",
            (response_id, first),
        )
        return rows[0][0] if rows else "", [Events(*row) for row in events]

    def last_position(self, response_id: str) -> str:
        """Return the writer's cursor after the last stored event."""
        row = self._db.execute(
            "SELECT position FROM events WHERE id = ? ORDER BY number DESC LIMIT 1", (response_id,)
        ).fetchone()
        return str(row[0]) if row else ""

    def owners(self) -> list[str]:
        """Return the owners of responses that have not ended."""
        return [
            str(row[0]) for row in self._db.execute(f"SELECT DISTINCT owner FROM responses WHERE {_OPEN}")
        ]

    def claim(self, owner: str, former: Sequence[str]) -> list[Record]:
        """Make ``owner`` answer the running responses of lost owners, and return these."""
        with self._db:
            marks = ", ".join("?" * len(former))
            rows = self._db.execute(
                f"UPDATE responses SET owner = ?, num_owners = num_owners + 1 WHERE {_OPEN} AND owner IN ({marks}) "
                f"RETURNING {_COLUMNS}",
                (owner, *former),
            ).fetchall()
        return [Record(*row) for row in rows]


class ResponseStore:
    """Asynchronous access to the file. Methods raise `RequestError` if it cannot be read or written."""

    def __init__(self, config: EngineConfig) -> None:
        self._limits = config.frontend
        self.path = Path(config.frontend.response_store or Path(config.run_dir) / FILE)
        self._server = Path(config.run_dir).name
        self._thread: ThreadPoolExecutor | None = None
        self._file: ResponseFile | None = None

    @property
    def is_enabled(self) -> bool:
        """True if responses are stored."""
        return self._limits.response_store_entries > 0

    def owner(self, worker: WorkerId) -> str:
        """Return a frontend's owner name, unique over restarts and servers."""
        return f"{self._server}/{worker.index}.{worker.epoch}"

    def is_lost(self, owner: str, topology: Topology) -> bool:
        """True if an owner is lost: of another server, or its slot is down or has a newer process."""
        server, _, slot = owner.rpartition("/")
        index, epoch = map(int, slot.split("."))
        return server != self._server or any(
            (each.worker.role, each.worker.index) == (Role.FRONTEND, index)
            and (each.worker.epoch > epoch or (each.worker.epoch == epoch and each.state is SlotState.DOWN))
            for each in topology.slots
        )

    async def do(self, work: Callable[[ResponseFile], _ResultT]) -> _ResultT:
        """Run ``work`` on the file's thread and return its result."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "responses")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._apply, work)
        except (sqlite3.Error, OSError) as error:
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"The response store cannot be read or written ({error}). Send store: false, or retry later.",
                "store",
            ) from error

    def _apply(self, work: Callable[[ResponseFile], _ResultT]) -> _ResultT:
        if self._file is None:
            self._file = ResponseFile(self.path, self._limits)
        return work(self._file)
