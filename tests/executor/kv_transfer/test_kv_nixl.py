"""A store over NIXL, against a stub of its agent; `tests/clients` tests it against NIXL itself and an S3 server."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from quintet.executor.kv_transfer.store import nixl
from quintet.executor.kv_transfer.store.connector import open_connector
from quintet.executor.kv_transfer.store.nixl import NixlStore
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

NAMES = [f"{'ab' * 16}/{number:064x}" for number in range(8)]


@dataclass
class Transfer:
    """A transfer between memory and an object."""

    operation: str
    address: int
    size: int
    name: str
    num_looks: int = 2
    """Number of polls until the transfer ends."""


class StubAgent:
    """A stub of NIXL's agent with object storage, by the docs of `nixl._api.nixl_agent`; an invalid call fails an assertion."""

    name = "stand-in"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.registered: list[Sequence[tuple[int, ...]]] = []
        self.state = "DONE"
        """Final state of transfers."""
        self.is_releasable = True

    def query_memory(
        self, reg_list: list[tuple[int, int, int, str]], backend: str, mem_type: str
    ) -> list[dict[str, str] | None]:
        assert (backend, mem_type) == ("OBJ", "OBJ")
        return [{} if name in self.objects else None for _, _, _, name in reg_list]

    def register_memory(
        self, reg_list: list[tuple[int, int, int, str]], mem_type: str, backends: list[str]
    ) -> tuple[str, list[tuple[int, int, int, str]]]:
        assert backends == ["OBJ"]
        self.registered.append(reg_list)
        return mem_type, reg_list

    def deregister_memory(self, dereg_list: tuple[str, list[tuple[int, ...]]], backends: list[str]) -> None:
        self.registered.remove(dereg_list[1])

    def get_xfer_descs(
        self, descs: list[tuple[int, int, int]], mem_type: str
    ) -> tuple[str, list[tuple[int, int, int]]]:
        return mem_type, descs

    def initialize_xfer(
        self,
        operation: str,
        local_descs: tuple[str, list[tuple[int, int, int]]],
        remote_descs: tuple[str, list[tuple[int, int, int]]],
        remote_agent: str,
        notif_msg: bytes,
        backends: list[str],
    ) -> Transfer:
        ((address, size, _),), ((offset, remote_size, number),) = local_descs[1], remote_descs[1]
        assert (local_descs[0], remote_descs[0], remote_agent) == ("DRAM", "OBJ", self.name)
        assert (offset, remote_size) == (0, size)
        names = [each[3] for regions in self.registered for each in regions if each[2] == number]
        assert number and len(names) == 1, "each object in transfer must have its own device id"
        assert any(each[:2] == (address, size) for regions in self.registered for each in regions)
        return Transfer(operation, address, size, str(names[0]))

    def transfer(self, handle: Transfer) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Transfer) -> str:
        handle.num_looks -= 1
        if handle.num_looks:
            return "PROC"
        if self.state == "DONE" and handle.operation == "WRITE":
            self.objects[handle.name] = ctypes.string_at(handle.address, handle.size)
        elif self.state == "DONE":
            content = self.objects[handle.name][: handle.size]
            ctypes.memmove(handle.address, content, len(content))
        return self.state

    def release_xfer_handle(self, handle: Transfer) -> None:
        if not self.is_releasable:
            raise RuntimeError("transfer in progress")


def get(store: NixlStore, name: str, size: int = 1000) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.get(name, memoryview(into)) else None


def test_stored_objects_are_read_back() -> None:
    agent = StubAgent()
    one, other = NixlStore(agent, "prefix"), NixlStore(agent, "prefix")
    assert one.put(NAMES[0], memoryview(b"a" * 1000)) and one.put(NAMES[1], memoryview(b"b" * 1000))
    assert [*agent.objects] == [f"prefix/{name}" for name in NAMES[:2]]
    assert get(other, NAMES[1]) == b"b" * 1000 and get(other, NAMES[2]) is None
    assert other.count(NAMES) == 2 and other.count(NAMES[1:]) == 1 and other.count(NAMES[2:]) == 0
    assert one.put(NAMES[0], memoryview(b"c" * 1000)) and get(other, NAMES[0]) == b"a" * 1000
    assert not agent.registered


def test_a_damaged_object_is_overwritten() -> None:
    agent = StubAgent()
    store = NixlStore(agent, "")
    assert store.put(NAMES[0], memoryview(b"a" * 1000))
    store.drop(NAMES[0])
    assert get(store, NAMES[0]) is None and store.count(NAMES) == 0
    assert store.put(NAMES[0], memoryview(b"c" * 1000)) and get(store, NAMES[0]) == b"c" * 1000


def test_a_transfer_that_fails_or_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = StubAgent()
    store = NixlStore(agent, "")
    agent.state = "ERR"
    with pytest.raises(OSError, match="transfer failed"):
        store.put(NAMES[0], memoryview(b"a" * 1000))
    assert not agent.registered and not store._unreleased
    agent.state, agent.is_releasable = "PROC", False
    monkeypatch.setattr(nixl, "TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match="transfer in progress"):
        store.put(NAMES[0], memoryview(b"a" * 1000))
    assert len(store._unreleased) == 1, "NIXL may still read the buffer"


def config(url: str) -> KvStoreConfig:
    return KvStoreConfig(url=url, waiting_bytes=1, staging_bytes=1)


def test_a_url_has_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    class Agent(StubAgent):
        def __init__(self, name: str, config: object) -> None:
            super().__init__()
            made.append((name, config))

        def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
            made.append((plugin, parameters))
            if parameters["bucket"] == "closed":
                raise RuntimeError("hunter2")

    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    store = open_connector(config("nixl+s3://bucket/some/prefix"))
    assert store.put(NAMES[0], memoryview(b"a")) and store.count(NAMES) == 1
    assert made[0][1] == [] and made[1] == ("OBJ", {"bucket": "bucket"})
    with pytest.raises(ConfigError, match="plug-in OBJ failed with RuntimeError") as refused:
        open_connector(config("nixl+s3://closed"))
    assert "hunter2" not in str(refused.value)


def test_without_nixl_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="pip install nixl"):
        open_connector(config("nixl+s3://bucket"))
