"""Response store: eviction, ownership and concurrent frontends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quintet.frontend.response_store import (
    CONVERSATION,
    ConversationTurn,
    Events,
    Record,
    ResponseFile,
    ResponseStore,
)
from quintet.wire.errors import RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import ProcessSlot, SlotState, Topology
from tests.frontend.configs import make_config


def opened(path: Path, **limits: Any) -> ResponseFile:
    return ResponseFile(path / "kept.sqlite", make_config(**limits).frontend)


def record(name: str, previous: str | None = None, owner: str = "run/0.1", **fields: Any) -> Record:
    values = {"status": "in_progress", "background": True, "streams": True, "items": b"[]", "answer": b"a"}
    return Record(name, owner, previous=previous, **{**values, **fields})


def end(file: ResponseFile, name: str) -> None:
    assert file.write_progress(name, "run/0.1", "completed", response=b"{}")


def test_oldest_finished_response_is_evicted(tmp_path: Path) -> None:
    file = opened(tmp_path, response_store_entries=2)
    for name in ("a", "b", "c"):
        file.insert(record(name))
    assert all(file.find(name) for name in "abc")  # responses in progress are not evicted
    for name in ("a", "c"):
        end(file, name)
    file.insert(record("d"))
    assert [file.find(name) is None for name in "abcd"] == [True, False, True, False]


def test_size_limit_counts_events_and_answers(tmp_path: Path) -> None:
    file = opened(tmp_path, response_store_bytes=1000)
    file.insert(record("a", items=b"[" + b" " * 150 + b"]"))
    file.note_request("a", "s", b"x" * 20)
    file.note_request("a", "s", b"x" * 150)
    file.write_progress("a", "run/0.1", "in_progress", Events(0, "", b"x" * 300))
    file.write_progress("a", "run/0.1", "completed", response=b"{" + b" " * 450 + b"}")
    file.insert(record("b"))
    assert file.find("a") is not None
    file.insert(record("c", items=b"[" + b" " * 100 + b"]"))
    assert file.find("a") is None and file.read_events("a", 0) == ("", [])
    assert file.find("b") is not None


def test_response_that_ends_twice_counts_once(tmp_path: Path) -> None:
    file = opened(tmp_path, response_store_bytes=1000)
    file.insert(record("a"))
    for _ in range(3):  # lost here, resumed elsewhere, and here again
        assert file.finish("a", "completed", b"{" + b" " * 450 + b"}", is_open=False)
    file.insert(record("b"))
    assert file.find("a") is not None


def test_conversation_turns_are_evicted_within_the_limit(tmp_path: Path) -> None:
    def join(kept: Record, added: Record) -> None:
        kept.items += added.items

    file = opened(tmp_path, response_store_bytes=4000, max_body_bytes=1000)
    file.insert(record("old"))
    end(file, "old")
    file.insert(record("c", status=CONVERSATION, items=b"x" * 700))
    for name in ("a", "b"):
        file.insert(record(name, items=b"y" * 600))
        file.write_progress(name, "run/0.1", "completed", response=b"{}", turn=ConversationTurn("c", join))
    assert file.find("old") is not None
    kept = file.find("c")
    assert kept is not None and len(kept.items) == 1300
    file.insert(record("d", items=b"z" * 900))
    file.rewrite("c", lambda kept: setattr(kept, "items", b""))
    file.write_progress("d", "run/0.1", "completed", response=b" " * 1800, turn=ConversationTurn("c", join))
    assert file.find("old") is None and file.find("a") is None, "least recently used"
    kept = file.find("c")
    assert kept is not None and len(kept.items) == 900


def test_age_counts_from_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    file = opened(tmp_path, response_store_hours=1)
    for name in ("a", "b"):
        file.insert(record(name))
        end(file, name)
    now += 3000
    assert [each.id for each in file.conversation("a")] == ["a"]
    now += 3000
    file.insert(record("c"))
    assert file.find("a") is not None and file.find("b") is None


def test_conversation_is_ordered_and_ends_at_a_missing_response(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        file.insert(record(name, previous, items=b"[ ]" if name == "b" else b"[]"))
    assert [each.id for each in file.conversation("c")] == ["a", "b", "c"]
    assert file.delete("a") and not file.delete("a")
    assert [(each.id, each.previous) for each in file.conversation("c")] == [("b", "a"), ("c", "b")]
    assert file.conversation("absent") == []
    with pytest.raises(RequestError, match="5 bytes; the limit is 4"):
        opened(tmp_path, max_body_bytes=4).conversation("c")


def test_only_the_owner_updates_a_response(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.insert(record("a"))
    assert file.write_progress("a", "run/0.1", "in_progress", Events(3, "p", b"one"))
    taken = file.claim("run/1.1", ["run/0.1"])[0]
    assert (taken.owner, taken.num_owners) == ("run/1.1", 2)
    assert file.claim("run/2.1", ["run/0.1"]) == []
    assert not file.write_progress("a", "run/0.1", "completed", Events(4, "q", b"two"), b"{}")
    assert file.last_position("a") == "p" and file.read_events("a", 3) == (
        "in_progress",
        [Events(3, "p", b"one")],
    )
    assert file.finish("a", "cancelled", b"{1}", is_open=True)
    assert not file.write_progress("a", "run/1.1", "completed", None, b"{}")
    assert not file.finish("a", "cancelled", b"{2}", is_open=True)
    assert file.finish("a", "completed", b"{3}", is_open=False)
    assert file.find("a").response == b"{3}"  # type: ignore[union-attr]


def slot(index: int, epoch: int, state: SlotState = SlotState.READY) -> ProcessSlot:
    return ProcessSlot(WorkerId(Role.FRONTEND, index, epoch), "ipc://x", 1, state)


@pytest.mark.parametrize(
    ("worker", "slots", "is_gone"),
    [
        ((0, 1), [slot(0, 1)], False),
        ((0, 1), [slot(0, 1, SlotState.STALLED)], False),
        ((0, 1), [slot(0, 1, SlotState.DOWN)], True),
        ((0, 1), [slot(0, 2, SlotState.STARTING)], True),
        ((0, 2), [slot(0, 1, SlotState.DOWN)], False),  # a topology older than the frontend
        ((0, 1), [slot(1, 7)], False),
    ],
)
def test_ended_owner_is_detected(worker: tuple[int, int], slots: list[ProcessSlot], is_gone: bool) -> None:
    store = ResponseStore(make_config("run-a"))
    owner = store.owner(WorkerId(Role.FRONTEND, *worker))
    assert store.is_lost(owner, Topology(1, slots)) is is_gone
    assert ResponseStore(make_config("run-b")).is_lost(owner, Topology(1, slots))


def test_concurrent_opens_share_the_file(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def use(index: int) -> None:
        try:
            file = opened(tmp_path)
            for number in range(20):
                file.insert(record(f"{index}-{number}", owner=f"run/{index}.1"))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(opened(tmp_path).owners()) == 6
    assert (tmp_path / "kept.sqlite").stat().st_mode & 0o777 == 0o600
