"""Publisher of an engine's KV events over ZeroMQ, with replay, in the protocol of vLLM's subscribers.

    loop ──▶ PUB: topic, sequence number, batch          to all subscribers
      └────▶ [ kept batches ] ◀── thread ── ROUTER: a sequence number; answered with all kept batches from it on,
                                                    as published, then -1

Neither socket waits for a slow peer: a slow subscriber loses batches and detects it by the sequence numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import zmq

from quintet.wire.errors import ConfigError
from quintet.wire.kv_events import KvEventsConfig, address_for

END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""
BOUND = ("*", "0.0.0.0", "127.0.0.1", "[::]", "[::1]")
"""Hosts of endpoints that are bound; other endpoints are connected."""


class KvPublisher:
    """Publisher; used from the loop only."""

    def __init__(self, config: KvEventsConfig, engine: int) -> None:
        """Raises `ConfigError` where an address cannot be used."""
        self._topic = config.topic.encode()
        self._number = 0
        """Number of the next batch."""
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._published = self._context.socket(zmq.PUB)
        self._published.setsockopt(zmq.LINGER, 200)
        self._published.setsockopt(zmq.SNDHWM, config.hwm)
        self._open(self._published, address_for(config.endpoint, engine))
        if config.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            replay.setsockopt(zmq.LINGER, 0)
            # Messages beyond the limit are dropped silently: it covers a full replay and its end.
            replay.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
            self._open(replay, address_for(config.replay_endpoint, engine))
            threading.Thread(target=self._answer, args=(replay,), name="kv-events", daemon=True).start()

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
        numbered = self._number.to_bytes(8, "big"), batch
        self._kept.append(numbered)
        self._published.send_multipart((self._topic, *numbered))
        self._number += 1

    def close(self) -> None:
        """Publish pending batches, and close the sockets."""
        self._published.close()
        self._context.term()  # ends the thread

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept batches from each requested number on."""
        with replay, contextlib.suppress(zmq.ContextTerminated):
            while True:
                identity, *_, first = replay.recv_multipart()
                for numbered in self._kept.copy():
                    if numbered[0] >= first:
                        replay.send_multipart((identity, b"", self._topic, *numbered))
                replay.send_multipart((identity, b"", b"", END, b""))
