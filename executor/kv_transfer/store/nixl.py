"""A store in object storage through NIXL, NVIDIA's transfer library: ``nixl+s3://bucket/prefix``.

Unlike fsspec, its plug-in ``OBJ`` uses S3 from C++ with many connections, and RDMA if the storage supports it. Users
install it with ``pip install nixl``. The plug-in reads credentials, region and endpoint from the environment
(``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_OVERRIDE``).

Only NIXL's storage access is used, with a single agent. Agents never exchange metadata (``get_agent_metadata``,
``add_remote_agent``), so no other process can write into this process's memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED, ObjectStore
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

PLUGIN = "OBJ"
MEMORY, OBJECTS = "DRAM", "OBJ"
"""Names of memory kinds in NIXL."""
POLL_S = 0.001
"""Polling interval of a transfer."""
TIMEOUT_S = 60.0
"""Timeout of a transfer."""


def open_nixl(config: KvStoreConfig) -> NixlStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    url = urlsplit(config.url)
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(f"--kv-store {config.url}: {error}. Install NIXL: pip install nixl") from None
    agent = nixl_agent(f"quintet-{os.getpid()}-{time.monotonic_ns()}", nixl_agent_config(backends=[]))
    try:
        agent.create_backend(PLUGIN, {"bucket": url.netloc})
    except Exception as error:  # noqa: BLE001 -- NIXL's exceptions are not documented
        raise ConfigError(
            f"--kv-store {config.url}: NIXL's plug-in {PLUGIN} failed with {type(error).__name__}: check that this build of NIXL"
            " contains it, and the environment (AWS_ENDPOINT_OVERRIDE, credentials)"
        ) from None
    return NixlStore(agent, url.path.strip("/"))


class NixlStore(ObjectStore):
    """Objects of NIXL's plug-in. Its methods raise NIXL's errors."""

    def __init__(self, agent: Any, prefix: str) -> None:
        """agent: a ``nixl_agent``, which has no types. prefix: path before the names of all objects."""
        self._agent = agent
        self._prefix = prefix
        self._lock = threading.Lock()
        """Guards the agent, which one thread at a time may use; only lookups block it."""
        self._numbers = itertools.count(1)
        """Device ids for objects during their transfer."""
        self._unreleased: list[memoryview] = []
        """Memory of transfers that could not be cancelled: NIXL may still write to it."""
        self._damaged: set[str] = set()
        """Damaged objects, treated as missing until overwritten: NIXL cannot remove objects."""

    def count(self, names: Sequence[str]) -> int:
        objects = [(0, 0, 0, self._path(name)) for name in names]
        with self._lock:
            known = self._agent.query_memory(objects, PLUGIN, mem_type=OBJECTS)
        remote = itertools.takewhile(
            lambda pair: pair[1] is not None and pair[0] not in self._damaged, zip(names, known, strict=True)
        )
        return sum(1 for _ in remote)

    def put(self, name: str, content: memoryview) -> bool:
        if not self.count([name]):
            self._move("WRITE", name, content)
            self._damaged.discard(name)
        return True

    def get(self, name: str, into: memoryview) -> bool:
        """Read an object. A shorter one leaves the end of ``into`` undefined; the block hashes detect that."""
        if not self.count([name]):
            return False
        self._move("READ", name, into)
        return True

    def drop(self, name: str) -> None:
        if len(self._damaged) >= MAX_DAMAGED:
            self._damaged.pop()
        self._damaged.add(name)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _move(self, operation: str, name: str, content: memoryview) -> None:
        """Write an object from memory, or read it into memory. Raises `OSError`.

        NIXL describes regions and objects as ``(address, size, number, name)``.
        """
        agent, plugins = self._agent, [PLUGIN]
        address, size = np.frombuffer(content, np.uint8).ctypes.data, len(content)
        with self._lock, contextlib.ExitStack() as known:
            number = next(self._numbers)
            for kind, region in (
                (MEMORY, (address, size, 0, "")),
                (OBJECTS, (0, size, number, self._path(name))),
            ):
                known.callback(
                    agent.deregister_memory,
                    agent.register_memory([region], kind, backends=plugins),
                    backends=plugins,
                )
            local = agent.get_xfer_descs([(address, size, 0)], MEMORY)
            remote = agent.get_xfer_descs([(0, size, number)], OBJECTS)
            handle = agent.initialize_xfer(operation, local, remote, agent.name, b"", backends=plugins)
            registered = known.pop_all()  # until the end of the transfer
        try:
            with self._lock:
                state = agent.transfer(handle)
            until_s = time.monotonic() + TIMEOUT_S
            while state == "PROC":
                if time.monotonic() > until_s:
                    raise TimeoutError("a NIXL transfer timed out")
                time.sleep(POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                self._unreleased.append(content)
                agent.release_xfer_handle(handle)
                self._unreleased.pop()
                registered.close()
        if state != "DONE":
            raise OSError("a NIXL transfer failed")
