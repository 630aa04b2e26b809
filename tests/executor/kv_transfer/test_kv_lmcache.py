"""A store in LMCache's server, against a stub; `tests/clients` tests it against the real server."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.executor.kv_transfer.lmcache_server import StubServer, stub_server

from quintet.executor.kv_transfer.store import lmcache
from quintet.executor.kv_transfer.store.connector import connector_path, open_connector
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

NAMES = [f"{'ab' * 16}/{number:064x}" for number in range(300)]
CONTENT = bytes(range(250)) * 4


@pytest.fixture
def server() -> Iterator[StubServer]:
    with stub_server() as server:
        yield server


def opened(server: StubServer) -> lmcache.LmStore:
    store = open_connector(config(server.url))
    assert isinstance(store, lmcache.LmStore)
    return store


def config(url: str) -> KvStoreConfig:
    return KvStoreConfig(url=url, waiting_bytes=1, staging_bytes=1)


def get(store: lmcache.LmStore, name: str, size: int = 1000) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.get(name, memoryview(into)) else None


def test_stored_objects_are_read_back(server: StubServer) -> None:
    one, other = opened(server), opened(server)
    assert one.put(NAMES[0], memoryview(CONTENT)) and one.put(NAMES[1], memoryview(b"b" * 1000))
    assert get(other, NAMES[0]) == CONTENT and get(other, NAMES[2]) is None
    assert other.count(NAMES) == 2 and other.count(NAMES[1:]) == 1 and other.count(NAMES[2:]) == 0
    assert one.put(NAMES[0], memoryview(b"c" * 1000)) and get(other, NAMES[0]) == CONTENT, (
        "put must accept an existing object"
    )
    one.close()
    other.close()


def test_names_with_leading_zeros_are_distinct(server: StubServer) -> None:
    store = opened(server)
    names = [f"{character * 32}/{zeros}07" for character in "0a" for zeros in ("", "00", "0000")]
    for name in names:
        assert store.put(name, memoryview(name.encode()))
    assert [get(store, name, len(name)) for name in names] == [name.encode() for name in names]
    store.close()


def test_a_long_chain_is_counted(server: StubServer) -> None:
    store = opened(server)
    for name in NAMES[:290]:
        store.put(name, memoryview(b"x"))
    assert store.count(NAMES) == 290 and store.count(NAMES[:290]) == 290 and store.count([]) == 0
    store.close()


def test_a_damaged_object_is_overwritten(server: StubServer) -> None:
    store = opened(server)
    assert store.put(NAMES[0], memoryview(b"a" * 1000))
    store.drop(NAMES[0])
    assert get(store, NAMES[0]) is None and store.count(NAMES) == 0
    assert store.put(NAMES[0], memoryview(CONTENT)) and get(store, NAMES[0]) == CONTENT
    store.close()


@pytest.mark.parametrize("wrong", ["size", "torn"])
def test_a_truncated_object_is_overwritten(wrong: str, server: StubServer) -> None:
    """The writer was killed; the real server reports such an object as existing."""
    store = opened(server)
    assert store.put(NAMES[0], memoryview(b"a" * 1000))
    server.objects = dict.fromkeys(server.objects, b"a" * 999 if wrong == "size" else None)
    assert store.count(NAMES) == 1 and get(store, NAMES[0]) is None
    assert store.put(NAMES[0], memoryview(CONTENT)) and get(store, NAMES[0]) == CONTENT
    store.close()


def test_a_connection_lost_during_a_read_leaves_the_object(server: StubServer) -> None:
    store = opened(server)
    assert store.put(NAMES[0], memoryview(CONTENT))
    server.closes_after_bytes = 1
    with pytest.raises(ConnectionError, match="closed the connection"):
        get(store, NAMES[0])
    server.closes_after_bytes = None
    assert store.count(NAMES) == 1 and get(store, NAMES[0]) == CONTENT
    store.close()


def test_a_server_restart_between_requests_causes_no_error(server: StubServer) -> None:
    store = opened(server)
    assert store.count(NAMES) == 0
    server.close_connections()
    assert store.count(NAMES) == 0 and store.put(NAMES[0], memoryview(CONTENT))
    store.close()


def test_a_slow_server_does_not_block_a_request_forever(server: StubServer) -> None:
    """The limit holds however quickly each reply arrives."""
    store = lmcache.LmStore(*server.address, timeout_s=0.3)
    server.pause_s = 0.05
    with pytest.raises(TimeoutError):
        store.count(NAMES[:100])
    server.pause_s = 0.0
    assert store.count(NAMES[:100]) == 0
    store.close()


def test_an_unknown_status_code_is_an_error(server: StubServer) -> None:
    store = opened(server)
    server.codes = (200, 500)
    with pytest.raises(ConnectionError, match="unknown code 500"):
        store.count(NAMES)
    store.close()


@pytest.mark.parametrize(
    "url", ["lm://host", "lm://host:port", "lm://host:1/below", "lm://:1", "lm://host:1?x=y"]
)
def test_a_url_has_the_server_address(url: str) -> None:
    with pytest.raises(ConfigError, match="use lm://host:port"):
        open_connector(config(url))


def test_a_request_to_a_missing_server_is_an_error() -> None:
    with stub_server() as server:
        store = opened(server)
    with pytest.raises(ConnectionError):
        store.count(NAMES)


def test_plug_ins_are_installed_and_not_imported() -> None:
    """After a change of `pyproject.toml`, reinstall the package."""
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    ours = tomllib.loads(pyproject.read_text())["project"]["entry-points"]["quintet.kv_connectors"]
    assert {scheme: connector_path(f"{scheme}://somewhere") for scheme in ours} == ours
    assert "lmcache" not in sys.modules and "nixl" not in sys.modules
