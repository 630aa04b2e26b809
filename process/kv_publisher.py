"""Publisher of an engine's KV events over ZeroMQ, with replay, in the protocol of vLLM's subscribers.

    loop ── batch ──▶ thread ──▶ PUB: topic, sequence number, batch          to all subscribers
                         ▲
                         └────── ROUTER: a sequence number; answered with all kept batches from it on, as published, then -1

A thread owns the sockets, so the loop never waits, and the thread sleeps when idle. A slow subscriber loses batches
and detects it by the sequence numbers.
"""

from __future__ import annotations

import threading
from collections import deque

import zmq

from quintet.wire.config import KvEventsConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_events import address_for

END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""
LOCAL = "inproc://kv-events"
BOUND = ("*", "0.0.0.0", "127.0.0.1", "[::]", "[::1]")
"""Hosts of endpoints that are bound; other endpoints are connected."""


class KvPublisher:
    """Publisher; used from the loop only."""

    def __init__(self, config: KvEventsConfig, engine: int) -> None:
        """Raises `ConfigError` where an address cannot be used."""
        self._topic = config.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = self._context.socket(zmq.PAIR)
        self._local.bind(LOCAL)
        self._batches = self._context.socket(zmq.PAIR)
        self._batches.connect(LOCAL)
        self._published = self._context.socket(zmq.PUB)
        self._published.setsockopt(zmq.LINGER, 200)
        self._published.setsockopt(zmq.SNDHWM, config.hwm)
        self._open(self._published, address_for(config.endpoint, engine))
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, 0)
            # Messages beyond the limit are dropped silently: it covers a full replay and its end.
            self._replay.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
            self._open(self._replay, address_for(config.replay_endpoint, engine))
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @staticmethod
    def _open(socket: zmq.Socket[bytes], address: str) -> None:
        host = address.partition("://")[2].rpartition(":")[0]
        try:
            if address.startswith("ipc://") or host in BOUND:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: cannot use {address} ({error.strerror})") from None

    def publish(self, batch: bytes) -> None:
        """Publish an encoded batch under the next number."""
        self._local.send(batch)

    def close(self) -> None:
        """Publish pending batches, and close the sockets."""
        self._local.send(b"")
        self._thread.join(1.0)
        self._local.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._batches, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._batches in ready:
                batch = self._batches.recv()
                if not batch:
                    break
                numbered = number.to_bytes(8, "big"), batch
                self._published.send_multipart((self._topic, *numbered))
                self._kept.append(numbered)
                number += 1
        for socket in (self._batches, self._published, self._replay):
            if socket is not None:
                socket.close()

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept batches from the requested number on."""
        identity, *_, first = replay.recv_multipart()
        for numbered in self._kept:
            if numbered[0] >= first:
                replay.send_multipart((identity, b"", self._topic, *numbered))
        replay.send_multipart((identity, b"", b"", END, b""))
