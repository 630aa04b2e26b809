"""Checks of shared KV stores against real storage servers."""

from __future__ import annotations

import time
from collections.abc import Callable

from quintet.executor.kv_transfer.store.connector import open_connector
from quintet.wire.config import KvStoreConfig
from tests.processes.kv.test_kv_store import CHUNK_TOKENS, FLAGS, ask, num_chunks
from tests.processes.server import serve, wait_until

CONTENT = bytes(range(256)) * 12_000
NAMES = [f"{'ab' * 16}/{number:064x}" for number in range(8)]


def check_objects(url: str) -> None:
    """Check put, get, count and drop of a connector."""
    config = KvStoreConfig(url=url, waiting_bytes=1, staging_bytes=1)
    one, other = open_connector(config), open_connector(config)
    for name in NAMES[:5]:
        assert one.put(name, memoryview(CONTENT))
    assert other.count(NAMES) == 5
    into = bytearray(len(CONTENT))
    assert other.get(NAMES[4], memoryview(into)) and into == CONTENT
    assert not other.get(NAMES[5], memoryview(into))
    other.drop(NAMES[0])
    assert not other.get(NAMES[0], memoryview(into))
    assert other.put(NAMES[0], memoryview(CONTENT)) and other.get(NAMES[0], memoryview(into))
    one.close()
    other.close()


def check_servers(url: str, end_storage: Callable[[], None]) -> None:
    """Check two servers that share a store, and then its loss."""
    flags = (*FLAGS, "--kv-store", url)
    with serve(*flags) as one, serve(*flags) as other:
        text, num_cached = ask(one)
        assert num_cached == 0
        wait_until(lambda: num_chunks(one, "stored") > 0, "the prompt in the store")
        assert ask(other) == (text, CHUNK_TOKENS)
        end_storage()
        started_s = time.monotonic()
        prompt = "No server has computed this. " * 40
        assert ask(one, prompt)[0] == ask(other, prompt)[0]
        print(f"{url}: without the storage after {time.monotonic() - started_s:.1f} s")
