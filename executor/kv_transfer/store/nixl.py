"""A store in object storage by way of NIXL, NVIDIA's library of transfers: ``nixl+s3://bucket/prefix``.

Beside what fsspec does, its plug-in ``OBJ`` speaks S3 from C++ with many connections, and over RDMA where a storage offers that.
``pip install nixl`` is the user's to do; credentials, region and endpoint come from the environment, as the plug-in reads them
(``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_OVERRIDE``).

Of NIXL only its storage is used, which one agent alone reaches: no agent hears of another (``get_agent_metadata``,
``add_remote_agent``), so nobody writes into this process's memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

PLUGIN = "OBJ"
MEMORY, OBJECTS = "DRAM", "OBJ"
"""Kinds of memory, as agents call them."""
LOOK_S = 0.001
"""Between two looks at a transfer."""
MOST_S = 60.0
"""A transfer that takes longer is given up."""

Descriptors = Any
"""Lists of regions, in a form of NIXL's own."""


class Agent(Protocol):
    """What is used of ``nixl._api.nixl_agent``."""

    name: str

    def query_memory(self, reg_list: Descriptors, backend: str, mem_type: str) -> list[dict[str, str] | None]:
        """Return what is known of each of these objects; None of one that is not there."""

    def register_memory(self, reg_list: Descriptors, mem_type: str, backends: list[str]) -> Descriptors:
        """Make regions, or objects, known: ``(address, size, number, name)``."""

    def deregister_memory(self, dereg_list: Descriptors, backends: list[str]) -> None:
        """Forget them."""

    def get_xfer_descs(self, descs: Descriptors, mem_type: str) -> Descriptors:
        """Return regions to transfer: ``(address, size, number)``."""

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Descriptors,
        remote_descs: Descriptors,
        remote_agent: str,
        notif_msg: bytes,
        backends: list[str],
    ) -> Any:
        """Return a transfer that is not begun."""

    def transfer(self, handle: Any) -> str:
        """Begin it; return ``DONE``, ``PROC`` or ``ERR``."""

    def check_xfer_state(self, handle: Any) -> str:
        """Return how it is."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Forget it; cancel it if it goes on."""


def open_nixl(config: KvStoreConfig) -> NixlStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    url = urlsplit(config.url)
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(f"--kv-store {config.url}: {error}. NIXL is needed: pip install nixl") from None
    agent = nixl_agent(f"quintet-{os.getpid()}-{time.monotonic_ns()}", nixl_agent_config(backends=[]))
    try:
        agent.create_backend(PLUGIN, {"bucket": url.netloc})
    except Exception as error:  # noqa: BLE001 -- NIXL has many, of which none is documented
        raise ConfigError(
            f"--kv-store {config.url}: NIXL's plug-in {PLUGIN} says {type(error).__name__}: is it part of this build of NIXL, and"
            " is the environment what it needs (AWS_ENDPOINT_OVERRIDE, credentials)?"
        ) from None
    return NixlStore(agent, url.path.strip("/"))


class NixlStore:
    """See `quintet.executor.kv_transfer.store.connector.KvConnector`. Errors are NIXL's."""

    def __init__(self, agent: Agent, prefix: str) -> None:
        """prefix: before the names of all objects."""
        self._agent = agent
        self._prefix = prefix
        self._lock = threading.Lock()
        """An agent is for one thread at a time; it waits for nobody but in questions."""
        self._numbers = itertools.count(1)
        """An object has one while it is on its way."""
        self._unreleased: list[memoryview] = []
        """Memory of transfers that could be neither ended nor cancelled: NIXL may still write to it."""
        self._damaged: set[str] = set()
        """NIXL cannot remove objects: these are written over."""

    def count(self, names: Sequence[str]) -> int:
        """See `KvConnector.count`."""
        asked = [(0, 0, 0, self._path(name)) for name in names]
        with self._lock:
            known = self._agent.query_memory(asked, PLUGIN, mem_type=OBJECTS)
        there = itertools.takewhile(
            lambda pair: pair[1] is not None and pair[0] not in self._damaged, zip(names, known, strict=True)
        )
        return sum(1 for _ in there)

    def put(self, name: str, content: memoryview) -> bool:
        """See `KvConnector.put`."""
        if not self.count([name]):
            self._move("WRITE", name, content)
            self._damaged.discard(name)
        return True

    def get(self, name: str, into: memoryview) -> bool:
        """See `KvConnector.get`. What is shorter leaves something else at the end of ``into``: its hashes tell."""
        if not self.count([name]):
            return False
        self._move("READ", name, into)
        return True

    def drop(self, name: str) -> None:
        """See `KvConnector.drop`."""
        if len(self._damaged) >= MAX_DAMAGED:
            self._damaged.pop()
        self._damaged.add(name)

    def close(self) -> None:
        """See `KvConnector.close`: an agent ends with its last user."""

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _move(self, operation: str, name: str, content: memoryview) -> None:
        """Have an object written from memory, or read into it. Raises `OSError`."""
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
            here = agent.get_xfer_descs([(address, size, 0)], MEMORY)
            there = agent.get_xfer_descs([(0, size, number)], OBJECTS)
            handle = agent.initialize_xfer(operation, here, there, agent.name, b"", backends=plugins)
            registered = known.pop_all()  # until the transfer has ended
        try:
            with self._lock:
                state = agent.transfer(handle)
            until_s = time.monotonic() + MOST_S
            while state == "PROC":
                if time.monotonic() > until_s:
                    raise TimeoutError("a transfer of NIXL does not end")
                time.sleep(LOOK_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                self._unreleased.append(content)
                agent.release_xfer_handle(handle)
                self._unreleased.pop()
                registered.close()
        if state != "DONE":
            raise OSError("a transfer of NIXL has failed")
