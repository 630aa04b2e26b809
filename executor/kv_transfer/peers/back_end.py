"""Peer back end, device half: offers copies of blocks to other servers, and fetches their blocks.

One thread serves the offers, several fetch. The core and the sender of a request decide which peer to fetch from
(`quintet.core.kv.peer_pool`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import zmq

from quintet.executor.kv_transfer.back_end import BackEnd, Task
from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.peers.keys import Context, read_key
from quintet.executor.kv_transfer.peers.kv_server import KvServer, OfferedBlocks
from quintet.executor.kv_transfer.peers.link import Link, PeerLost
from quintet.executor.kv_transfer.peers.messages import OwnIdentity
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig, KvPeersConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import Fetch, KvTierRequests

log = logging.getLogger(__name__)


class PeerBackEnd(BackEnd):
    """See `quintet.executor.kv_transfer.back_end`."""

    tier = "peer"
    num_threads = 8
    close_timeout_s = 1.0

    def __init__(
        self, blocks: WholeBlocks, host_blocks: range, own: OwnIdentity, listen: str, num_offered: int
    ) -> None:
        """listen: ``host:port``, "" for none. num_offered: capacity for offered blocks. Raises `ConfigError`."""
        super().__init__(blocks, host_blocks)
        self._offered = OfferedBlocks(blocks, num_offered)
        self._own = own
        self._context: Context = zmq.Context()
        self._backoff_until: dict[str, float] = {}
        """Lost peer -> time until which it is not used."""
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._server: KvServer | None = None
        if listen:
            try:
                self._server = KvServer(self._context, listen, own, self._offered)
            except ConfigError:
                self.close_storage()
                raise
            self.add_thread(partial(self._server.serve, self._wakeup_fd), "kv-peers")

    def store_tasks(self, requests: KvTierRequests) -> Iterator[Task]:
        """See `BackEnd.store_tasks`: offers are copies in memory, without a task."""
        for store in requests.stores:
            self._offered.put(store.keys, np.frombuffer(store.blocks, np.int32))
        return iter(())

    def run_fetch(self, fetch: Fetch, task: Task) -> None:
        """See `BackEnd.run_fetch`. Each block is reported as it arrives."""
        peer, left = fetch.source.decode(errors="replace"), dict(enumerate(unpack_i32(fetch.host_blocks)))
        link = self._connect(peer)
        try:
            for index, block in link.fetch(fetch.keys, lambda: self.is_void(task)) if link else ():
                host_block = left.pop(index)
                if block is None:
                    self.report_fetch(task, [], [host_block])
                else:
                    self.write_staging(task, host_block, block)
                    self.report_fetch(task, [host_block], [])
        except PeerLost as lost:
            log.warning("KV peer %s %s: %d blocks will be computed instead", peer, lost, len(left))
            with self.changed:
                self._backoff_until[peer] = time.monotonic() + lost.backoff_s
        finally:
            if link is not None:
                link.close()
        self.report_fetch(task, [], [*left.values()])

    def _connect(self, peer: str) -> Link | None:
        """Return a link to a peer; None during its backoff, or for an invalid address."""
        now_s = time.monotonic()
        with self.changed:
            self._backoff_until = {
                each: until_s for each, until_s in self._backoff_until.items() if until_s > now_s
            }
            if peer in self._backoff_until:
                return None
        try:
            return Link(self._context, peer, self._own, self.blocks.block_bytes)
        except zmq.ZMQError as error:
            log.warning("invalid KV peer address %s: %s", peer, error.strerror)
            return None

    def wake(self) -> None:
        os.eventfd_write(self._wakeup_fd, 1)

    def close_storage(self) -> None:
        if self._server is not None:
            self._server.close()
        self._context.term()
        os.close(self._wakeup_fd)


def open_peers(
    blocks: WholeBlocks, host_blocks: range, peers: KvPeersConfig, config: EngineConfig, runner: str
) -> PeerBackEnd:
    """See `quintet.executor.kv_transfer.connector.OpenBackEnd`."""
    num_offered = config.model.kv.num_offloaded_blocks(peers.offered_bytes)
    parts = parts_of(config, runner)
    key = read_key(peers.key_file, "--kv-peer-key", b"quintet peers")
    own = OwnIdentity(key, whole_of(parts), parts)
    opened = PeerBackEnd(blocks, host_blocks, own, peers.listen, num_offered)
    if peers.listen:
        log.info("KV for other servers: %d blocks at %s", num_offered, peers.listen)
    return opened
