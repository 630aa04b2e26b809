"""Connectors: a folder shared by processes that may die, fsspec, and connectors of installed packages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import uuid
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import fsspec
import pytest

from quintet.executor.kv_transfer.store import connector as connector_module
from quintet.executor.kv_transfer.store.connector import ObjectStore, open_connector
from quintet.executor.kv_transfer.store.folder import SUBFOLDER, FolderStore
from quintet.executor.kv_transfer.store.objects import NUM_PARALLEL_LOOKUPS, FsspecStore, count_first
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

NAMES = [f"{'ab' * 16}/{number:064x}" for number in range(40)]
CONTENT = [bytes([number]) * 1000 for number in range(40)]


def config(url: str, size_bytes: int = 0) -> KvStoreConfig:
    return KvStoreConfig(url=url, size_bytes=size_bytes, waiting_bytes=1, staging_bytes=1)


def put(store: ObjectStore, number: int) -> bool:
    return store.put(NAMES[number], memoryview(CONTENT[number]))


def has(store: ObjectStore, number: int) -> bool:
    into = bytearray(1000)
    return store.get(NAMES[number], memoryview(into)) and bytes(into) == CONTENT[number]


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "ledger")


# --- a folder ---


def test_a_full_folder_evicts_least_recently_used_objects(tmp_path: Path) -> None:
    one, other = FolderStore(tmp_path, 10_000), FolderStore(tmp_path, 10_000)
    for number in range(10):
        assert put(one if number % 2 else other, number)
        os.utime(tmp_path / NAMES[number], (number, number))
    assert has(one, 0), "a read block must be the most recently used"
    assert put(other, 10)
    assert [number for number in range(11) if has(one, number)] == [0, *range(3, 11)], (
        "expected nine tenths of the size"
    )
    for number in range(11, 40):
        assert put(one, number) and kept_bytes(tmp_path) <= 10_000
    one.drop(NAMES[39])
    assert not has(other, 39) and other.count([NAMES[38], NAMES[39], NAMES[38]]) == 1
    assert not one.put(NAMES[0], memoryview(bytes(10_001))), (
        "an object larger than the folder must be rejected"
    )
    one.close()
    other.close()


def test_an_object_written_twice_concurrently_counts_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 10_000)
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        assert put(store, 1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int.from_bytes((tmp_path / "ledger").read_bytes(), "little") == 1000 == kept_bytes(tmp_path)
    store.close()


WRITER = """
import os, sys
from pathlib import Path
from quintet.executor.kv_transfer.store import folder
write = folder.write_whole
def half(file, content, offset):
    write(file, content[:500], offset)
    print("written", flush=True)
    sys.stdin.read()
folder.write_whole = half
folder.FolderStore(Path(sys.argv[1]), 10_000).put(sys.argv[2], memoryview(bytes(1000)))
"""


def test_partial_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    """Files of live writers remain, and count."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([*command, NAMES[30]], **pipes) as dead,  # type: ignore[call-overload]
        subprocess.Popen([*command, NAMES[31]], **pipes) as living,  # type: ignore[call-overload]
    ):
        for writer in (dead, living):
            assert writer.stdout.readline() == b"written\n"
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        store = FolderStore(tmp_path, 10_000)
        assert not has(store, 30) and store.count(NAMES[30:]) == 0
        for number in range(20):
            assert put(store, number) and kept_bytes(tmp_path) <= 10_000
        (unfinished,) = tmp_path.rglob(".*")
        assert NAMES[31].rpartition("/")[2] in unfinished.name
        living.stdin.close()
    store.close()


def test_a_locked_ledger_blocks_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FolderStore(tmp_path, 10_000), FolderStore(tmp_path, 10_000)
    monkeypatch.setattr("quintet.executor.kv_transfer.store.folder.LOCK_S", 0.05)
    with one._locked_ledger():
        for store in (one, other):
            with pytest.raises(TimeoutError):
                put(store, 1)
    assert put(other, 1)


def test_unrecorded_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FolderStore(tmp_path, 10_000), FolderStore(tmp_path, 10_000)
    with monkeypatch.context() as patch, contextlib.ExitStack() as held:

        def write(*_: object) -> bool:
            held.enter_context(other._locked_ledger())
            return True

        patch.setattr("quintet.executor.kv_transfer.store.folder.LOCK_S", 0.05)
        patch.setattr("quintet.executor.kv_transfer.store.folder.write_whole", write)
        with pytest.raises(TimeoutError):
            put(one, 30)
    for number in range(11):
        assert put(one, number)
    assert not [*tmp_path.rglob(".*")]
    one.close()
    other.close()


def test_a_folder_full_of_partial_files_accepts_no_more(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 2_000)
    assert put(store, 1)
    with store._locked_ledger():
        (tmp_path / "ledger").write_bytes((3_000).to_bytes(8, "little"))
    with open((tmp_path / NAMES[1]).with_name(".other.1-0"), "wb") as unfinished:
        fcntl.flock(unfinished, fcntl.LOCK_EX)
        os.ftruncate(unfinished.fileno(), 1_500)
        assert not put(store, 2) and kept_bytes(tmp_path) <= 2_000
    assert put(store, 3) and kept_bytes(tmp_path) <= 2_000, "swept"
    store.close()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store", 10_000)
    assert put(store, 1)
    (tmp_path / "store" / NAMES[2]).symlink_to(tmp_path / "store" / NAMES[1])
    with pytest.raises(PermissionError):
        has(store, 2)
    store.close()


# --- by URL ---


def test_a_url_selects_the_connector(tmp_path: Path) -> None:
    opened = open_connector(config(f"file://{tmp_path}", 10_000))
    assert isinstance(opened, FolderStore) and put(opened, 1)
    assert (tmp_path / SUBFOLDER / NAMES[1]).exists()
    opened.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        open_connector(config(f"file://{tmp_path}/file/x", 10_000))


def test_an_installed_package_can_provide_a_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("plugin", f"{__name__}:plugin", "quintet.kv_connectors")

    def installed(group: str, name: str) -> EntryPoints:
        return EntryPoints([entry]).select(group=group, name=name)

    monkeypatch.setattr(connector_module, "entry_points", installed)
    opened = open_connector(config(f"plugin://{tmp_path}"))
    assert put(opened, 1) and has(opened, 1)
    opened.close()


def plugin(config: KvStoreConfig) -> ObjectStore:
    """A connector that a package would provide."""
    return FolderStore(Path(config.url.removeprefix("plugin://")), 10_000)


# --- fsspec ---


def test_fsspec_storage_is_a_store() -> None:
    url = f"memory://{uuid.uuid4().hex}/prefix/"
    one, other = open_connector(config(url)), open_connector(config(url))
    assert isinstance(one, FsspecStore)
    assert put(one, 1) and put(one, 1) and has(other, 1) and not has(other, 2)
    assert not other.get(NAMES[1], memoryview(bytearray(999)))
    assert other.count(NAMES[1:]) == 1 and other.count(NAMES) == 0
    other.drop(NAMES[1])
    other.drop(NAMES[1])
    assert not has(one, 1)
    one.close()
    other.close()


def test_an_error_in_a_search_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("local", skip_instance_cache=True)
    store = FsspecStore(files, str(tmp_path))
    assert put(store, 1)

    def closed(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "info", closed)
    with pytest.raises(PermissionError):
        store.count(NAMES[1:20])


def test_a_missing_bucket_is_not_created(tmp_path: Path) -> None:
    files = fsspec.filesystem("local", skip_instance_cache=True)
    with pytest.raises(FileNotFoundError):
        put(FsspecStore(files, str(tmp_path / "mistyped" / "prefix")), 1)
    assert not (tmp_path / "mistyped").exists()


def test_a_failing_package_is_named_without_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object, **__: object) -> None:
        raise RuntimeError("hunter2")

    monkeypatch.setattr(fsspec.core, "url_to_fs", begin)
    with pytest.raises(ConfigError, match=r"the package for gs failed to start \(RuntimeError\)") as refused:
        open_connector(config("gs://bucket/prefix"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "unknown://bucket/it"])
def test_an_unknown_scheme_is_rejected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="the package of that storage"):
        open_connector(config(url))


@pytest.mark.parametrize("number", [*range(30), 128, 1000])
def test_a_chain_is_searched_by_bisection(number: int) -> None:
    for there in {0, min(1, number), number // 2, max(0, number - 1), number}:
        rounds: list[int] = []

        def exist(indexes: object, there: int = there, rounds: list[int] = rounds) -> list[bool]:
            rounds.append(len(indexes))  # type: ignore[arg-type]
            return [index < there for index in indexes]  # type: ignore[attr-defined]

        assert count_first(number, exist) == there
        assert len(rounds) <= 5 and all(0 < count <= NUM_PARALLEL_LOOKUPS for count in rounds)
