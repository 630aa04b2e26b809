"""KV of peer servers, the executor's half: offers copies of blocks, and fetches peers' blocks to host staging blocks.

    loop       order: copies blocks out ──▶ ( offered )          [ pulls ]           [ results ] ──▶ core
    thread             peers' requests ──▶ KvServer ─┘               └─▶ links ──▶ staging ─┘ wakes the loop

Only the thread uses the sockets, so no step waits for another server. The core and the sender of a request decide
which peer to fetch from (`quintet.core.kv.peer_pool`).

`open_kv_peers` opens the tier from the configuration.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import zmq

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, WholeBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.peers.keys import Context, PeerAuthenticator, PeerKey, read_key
from quintet.executor.kv_transfer.peers.kv_server import KvServer
from quintet.executor.kv_transfer.peers.link import BlockArrival, Link, PeerLost, WantedBlock
from quintet.executor.kv_transfer.peers.offered_blocks import OfferedBlocks
from quintet.executor.memory import lazy_zeros
from quintet.process.os_tuning import set_batch_scheduling
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig, KvPeersConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults

log = logging.getLogger(__name__)

POLL_MS = 200
"""Interval between checks of silent peers and of an occupied listen address."""
MAX_LINKS = 64
CLOSE_TIMEOUT_S = 1.0


class PeerBlocks:
    """See `quintet.executor.interface.KvTierWorker`."""

    def __init__(
        self,
        blocks: WholeBlocks,
        parts: Mapping[str, str],
        identity: bytes,
        listen: str,
        key: PeerKey | None,
        num_offered: int,
        num_staging_blocks: int,
        first_host_block: int,
    ) -> None:
        """parts, identity: see `quintet.executor.kv_transfer.kv_identity`.

        listen: ``host:port``, "" for none. num_offered: capacity for offered blocks. Raises `ConfigError`.
        """
        self._blocks = blocks
        self._offered = OfferedBlocks(self._blocks, num_offered)
        self._parts, self._identity, self._key = parts, identity, key
        self.num_staging_blocks = num_staging_blocks
        self._first = first_host_block
        shape = (num_staging_blocks, self._blocks.block_bytes)
        self._staging: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._ring: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        """Guards the fields below, up to the sockets."""
        self._pulls: deque[tuple[str, list[WantedBlock]] | None] = deque()
        """Peer and wanted blocks; None: cancel all earlier pulls."""
        self._failure: Exception | None = None
        """Error that ended the thread."""
        self._tables = 0
        self._results = KvTierResults(0, 0)
        self._has_results = False
        self._is_closing = False
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: Context = zmq.Context()
        self._authenticator = None if key is None else PeerAuthenticator(self._context, key)
        self._server: KvServer | None = None
        self._links: dict[str, Link] = {}
        self._backoff_until: dict[str, float] = {}
        """Lost peer -> time until which it is not used."""
        self._thread = threading.Thread(target=self._work, name="kv-peers", daemon=True)
        try:
            if listen:
                self._server = KvServer(self._context, listen, key, self._offered, identity, parts)
        except ConfigError:
            self._close_sockets()
            raise

    # --- the loop's side ---

    def begin(self, ring: Callable[[], None]) -> None:
        """See `KvTierWorker.begin`."""
        self._ring = ring
        self._thread.start()

    def order(self, orders: KvTierRequests) -> None:
        """See `KvTierWorker.order`."""
        if orders.offer_keys:
            self._offered.put(orders.offer_keys, np.frombuffer(orders.offers, np.int32))
        tables = orders.tables
        with self._lock:
            if tables != self._tables:
                self._tables, self._results, self._has_results = tables, KvTierResults(0, tables), False
            for pull in orders.pulls:
                pairs = zip(unpack_i32(pull.host_blocks), pull.keys, strict=True)
                self._pulls.append((pull.peer, [WantedBlock(tables, block, key) for block, key in pairs]))
        if orders.pulls:
            self._wake()

    def copy_in(self, blocks: Int, host_blocks: Int) -> None:
        """See `KvTierWorker.copy_in`."""
        self._blocks.put(blocks, self._staging[host_blocks - self._first])

    def take_results(self) -> KvTierResults | None:
        """See `KvTierWorker.take_results`."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("the KV peer thread failed") from self._failure
            if not self._has_results:
                return None
            results, self._results = self._results, KvTierResults(0, self._tables)
            self._has_results = False
        return results

    def reset(self) -> None:
        """See `KvTierWorker.reset`."""
        with self._lock:
            self._pulls.clear()
            self._pulls.append(None)
            self._results, self._has_results = KvTierResults(0, self._tables), False
        self._wake()

    def close(self) -> None:
        """See `KvTierWorker.close`."""
        with self._lock:
            self._is_closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup_fd, 1)

    # --- the thread's side ---

    def _work(self) -> None:
        """Serve and fetch until closed. Errors of peers are results; any other error is a bug and ends the loop too."""
        set_batch_scheduling()
        try:
            if self._server is not None and not self._server.is_open:
                log.warning(
                    "%s is in use: KV will be offered there once it is free; until then peers compute",
                    self._server.address,
                )
            while not self._is_closing:
                self._run_once()
            self._close_sockets()
        except Exception as failure:  # noqa: BLE001 -- the loop raises it
            with self._lock:
                self._failure = failure
            self._ring()

    def _run_once(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup_fd, zmq.POLLIN)
        for each in (self._server, self._authenticator):
            if each is not None:
                poller.register(each.socket, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        is_awaiting = any(not link.is_idle for link in self._links.values())
        if self._server is not None and not self._server.is_open:
            self._server.open()
            is_awaiting = True
        ready = {source for source, _ in poller.poll(POLL_MS if is_awaiting else None)}
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.answer()
        if self._server is not None and self._server.socket in ready:
            self._server.answer()
        now_s = time.monotonic()
        for link in [*self._links.values()]:
            self._service_link(link, ready, now_s)
        if self._wakeup_fd in ready:
            os.eventfd_read(self._wakeup_fd)
            self._pull(now_s)

    def _service_link(self, link: Link, ready: set[object], now_s: float) -> None:
        """Receive a peer's messages; drop the link if the peer is lost."""
        arrivals: list[BlockArrival] = []
        try:
            if link.socket in ready:
                for each in link.receive(now_s):
                    arrivals.append(each)
            if link.monitor in ready:
                link.receive_event()
            link.check(now_s)
        except PeerLost as lost:
            arrivals += self._drop_link(link, lost, now_s)
        self._report(arrivals)

    def _drop_link(self, link: Link, lost: PeerLost, now_s: float) -> list[BlockArrival]:
        left = link.left()
        if left:
            log.warning("KV peer %s %s: %d blocks will be computed instead", link.peer, lost, len(left))
            self._backoff_until[link.peer] = now_s + lost.backoff_s
        link.close()
        del self._links[link.peer]
        return [BlockArrival(wanted, is_there=False) for wanted in left]

    def _pull(self, now_s: float) -> None:
        """Request the queued pulls."""
        with self._lock:
            pulls = [*self._pulls]
            self._pulls.clear()
        self._backoff_until = {
            peer: until_s for peer, until_s in self._backoff_until.items() if until_s > now_s
        }
        for pull in pulls:
            if pull is None:
                for link in self._links.values():
                    link.forget()
                continue
            peer, wanted = pull
            peer_link = None if peer in self._backoff_until else self._link_to(peer)
            if peer_link is None:
                self._report([BlockArrival(each, is_there=False) for each in wanted])
            else:
                try:
                    peer_link.request(wanted, now_s)
                except PeerLost as lost:
                    self._report(self._drop_link(peer_link, lost, now_s))

    def _link_to(self, peer: str) -> Link | None:
        """Return the link to a peer; None for an invalid address, or if there are too many busy links."""
        link = self._links.get(peer)
        if link is not None:
            return link
        if len(self._links) >= MAX_LINKS:
            idle = next((link for link in self._links.values() if link.is_idle), None)
            if idle is None:
                return None
            idle.close()
            del self._links[idle.peer]
        try:
            link = Link(
                self._context, peer, self._key, self._identity, self._parts, self._staging, self._first
            )
        except zmq.ZMQError as error:
            log.warning("invalid KV peer address %s: %s", peer, error.strerror)
            return None
        self._links[peer] = link
        return link

    def _report(self, arrivals: Sequence[BlockArrival]) -> None:
        """Report results of fetches to the core."""
        with self._lock:
            current = [each for each in arrivals if each.wanted.tables == self._tables]
            if not current:
                return
            self._results.pulled += pack_i32(each.wanted.host_block for each in current if each.is_there)
            self._results.lacking += pack_i32(each.wanted.host_block for each in current if not each.is_there)
            if self._has_results:
                return
            self._has_results = True
        self._ring()

    def _close_sockets(self) -> None:
        for link in self._links.values():
            link.close()
        for each in (self._server, self._authenticator):
            if each is not None:
                each.socket.close(linger=0)
        self._context.term()


def open_kv_peers(
    blocks: WholeBlocks, peers: KvPeersConfig, config: EngineConfig, runner: str, first_host_block: int
) -> PeerBlocks:
    """Return the peer tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the listen address is invalid.
    """
    num_blocks = config.model.kv.num_blocks
    parts = parts_of(config, runner)
    opened = PeerBlocks(
        blocks,
        parts,
        whole_of(parts),
        peers.listen,
        read_key(peers.key_file, "--kv-peer-key", b"quintet peers") if peers.key_file else None,
        num_blocks(peers.offered_bytes),
        num_blocks(peers.staging_bytes),
        first_host_block,
    )
    if peers.listen:
        log.info("KV for other servers: %d blocks at %s", num_blocks(peers.offered_bytes), peers.listen)
    return opened
