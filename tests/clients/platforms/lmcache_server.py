"""Servers with LMCache's server as shared KV store: fetches, and operation after its loss."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.clients.kv_stores import CONTENT, NAMES, check_objects, check_servers
from tests.processes.server import wait_until

from quintet.executor.kv_transfer.store.connector import open_connector
from quintet.wire.config import KvStoreConfig

ORDER = struct.Struct("<9i150s")


@contextlib.contextmanager
def lmcache_server() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run LMCache's server without usage tracking; yield its port and process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    with (
        open("lmcache.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as server,
    ):
        try:
            wait_until(lambda: listens(port), "LMCache's server")
            yield port, server
        finally:
            server.kill()


def listens(port: int) -> bool:
    """Return True if a connection to the port succeeds."""
    try:
        socket.create_connection(("127.0.0.1", port), 5.0).close()
    except OSError:
        return False
    return True


def check_torn(port: int) -> None:
    """A truncated put of a killed writer is no object."""
    config = KvStoreConfig(url=f"lm://127.0.0.1:{port}", waiting_bytes=1, staging_bytes=1)
    store = open_connector(config)
    folder, _, key = NAMES[7].partition("/")
    object_name = f"quintet-{folder}@1@0@1{key}@uint8".encode()
    with socket.create_connection(("127.0.0.1", port)) as killed:
        order = ORDER.pack(1, len(CONTENT), 4, 6, 0, len(CONTENT), 0, 0, 0, object_name.ljust(150))
        killed.sendall(order + CONTENT[: len(CONTENT) // 2])
    wait_until(lambda: store.count(NAMES[7:]) == 1, "the truncated object in the server's list")
    into = bytearray(len(CONTENT))
    assert not store.get(NAMES[7], memoryview(into))
    assert store.put(NAMES[7], memoryview(CONTENT)) and store.get(NAMES[7], memoryview(into))
    assert into == CONTENT
    store.close()


def main() -> None:
    """Run all checks."""
    with lmcache_server() as (port, server):
        check_objects(f"lm://127.0.0.1:{port}")
        check_torn(port)
        check_servers(f"lm://127.0.0.1:{port}", server.kill)


if __name__ == "__main__":
    main()
