"""Peer back end, device half: offers copies of blocks to other servers, and fetches their blocks.

    loop       order: copies blocks out ──▶ ( offered )          [ fetches ]         [ results ] ──▶ core
    thread             peers' requests ──▶ KvServer ─┘               └─▶ links ──▶ staging ─┘ wakes the loop

One thread uses the sockets. The core and the sender of a request decide which peer to fetch from
(`quintet.core.kv.peer_pool`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import zmq

from quintet.executor.kv_transfer.back_end import BackEnd
from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.peers.keys import Context, PeerAuthenticator, PeerKey, read_key
from quintet.executor.kv_transfer.peers.kv_server import KvServer
from quintet.executor.kv_transfer.peers.link import BlockArrival, Link, PeerLost, WantedBlock
from quintet.executor.kv_transfer.peers.offered_blocks import OfferedBlocks
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import KvTierRequests

log = logging.getLogger(__name__)

POLL_MS = 200
"""Interval between checks of silent peers and of an occupied listen address."""
MAX_LINKS = 64


class PeerBackEnd(BackEnd):
    """See `quintet.executor.kv_transfer.back_end`."""

    tier = "peer"
    close_timeout_s = 1.0

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
        super().__init__(blocks, num_staging_blocks, first_host_block)
        self._offered = OfferedBlocks(blocks, num_offered)
        self._parts, self._identity, self._key = parts, identity, key
        self._fetches: deque[tuple[str, list[WantedBlock]] | None] = deque()
        """Peer and wanted blocks; None: cancel all earlier ones."""
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: Context = zmq.Context()
        self._authenticator = None if key is None else PeerAuthenticator(self._context, key)
        self._server: KvServer | None = None
        self._links: dict[str, Link] = {}
        self._backoff_until: dict[str, float] = {}
        """Lost peer -> time until which it is not used."""
        self.add_thread(self._work, "kv-peers")
        try:
            if listen:
                self._server = KvServer(self._context, listen, key, self._offered, identity, parts)
        except ConfigError:
            self._close_sockets()
            raise

    # --- the loop's side ---

    def order(self, requests: KvTierRequests) -> None:
        """See `BackEnd.order`."""
        for store in requests.stores:
            self._offered.put(store.keys, np.frombuffer(store.blocks, np.int32))
        with self.changed:
            self.follow(requests.tables)
            for fetch in requests.fetches:
                pairs = zip(unpack_i32(fetch.host_blocks), fetch.keys, strict=True)
                wanted = [WantedBlock(requests.tables, block, key) for block, key in pairs]
                self._fetches.append((fetch.source.decode(errors="replace"), wanted))
        if requests.fetches:
            self.wake()

    def cancel(self) -> None:
        """See `BackEnd.cancel`."""
        self._fetches.clear()
        self._fetches.append(None)

    def wake(self) -> None:
        """See `BackEnd.wake`."""
        os.eventfd_write(self._wakeup_fd, 1)

    # --- the thread's side ---

    def _work(self) -> None:
        """Serve and fetch until closed."""
        if self._server is not None and not self._server.is_open:
            log.warning(
                "%s is in use: KV will be offered there once it is free; until then peers compute",
                self._server.address,
            )
        while not self.is_closing:
            self._run_once()
        self._close_sockets()

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
            self._fetch(now_s)

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

    def _fetch(self, now_s: float) -> None:
        """Request the queued fetches."""
        with self.changed:
            fetches = [*self._fetches]
            self._fetches.clear()
        self._backoff_until = {
            peer: until_s for peer, until_s in self._backoff_until.items() if until_s > now_s
        }
        for fetch in fetches:
            if fetch is None:
                for link in self._links.values():
                    link.forget()
                continue
            peer, wanted = fetch
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
            link = Link(self._context, peer, self._key, self._identity, self._parts, self.staging, self.first)
        except zmq.ZMQError as error:
            log.warning("invalid KV peer address %s: %s", peer, error.strerror)
            return None
        self._links[peer] = link
        return link

    def _report(self, arrivals: Sequence[BlockArrival]) -> None:
        """Report results of fetches to the core."""
        with self.changed:
            current = [each for each in arrivals if each.wanted.tables == self.tables]
            if current:
                results = self.results
                results.fetched += pack_i32(each.wanted.host_block for each in current if each.is_there)
                results.missed += pack_i32(each.wanted.host_block for each in current if not each.is_there)
                self.report()

    def _close_sockets(self) -> None:
        for link in self._links.values():
            link.close()
        for each in (self._server, self._authenticator):
            if each is not None:
                each.socket.close(linger=0)
        self._context.term()


def open_peers(
    blocks: WholeBlocks, config: EngineConfig, runner: str, first_host_block: int
) -> PeerBackEnd | None:
    """Return the back end, if it is configured. See `quintet.executor.kv_transfer.tiers.BACK_ENDS`."""
    peers = config.cache.peers
    if peers is None:
        return None
    num_blocks = config.model.kv.num_blocks
    parts = parts_of(config, runner)
    opened = PeerBackEnd(
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
