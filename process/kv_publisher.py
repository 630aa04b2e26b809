"""Publishes an engine's KV events over ZeroMQ, and again to who missed some, as vLLM's subscribers ask for them.

    loop ── batch ──▶ thread ──▶ PUB: topic, sequence number, batch          to all who subscribe
                         ▲
                         └────── ROUTER: a sequence number; answered with all kept batches, as published, from there on, then -1

A thread has the sockets, so the loop waits for nobody, and it sleeps while there is nothing to say. Who is too slow loses
batches, and sees it by the numbers.
"""

from __future__ import annotations

import threading
from collections import deque

import zmq

from quintet.wire.config import KvEventsConfig
from quintet.wire.errors import ConfigError

END = (-1).to_bytes(8, "big", signed=True)
"""In the place of a number: nothing more follows."""
LOCAL = "inproc://kv-events"
BOUND = ("*", "0.0.0.0", "127.0.0.1", "[::]", "[::1]")
"""Hosts of addresses that are bound; to any other, somebody listens."""


def address_for(endpoint: str, engine: int) -> str:
    """Return the address of one engine: the port, plus its number. Of what is no port, the number behind it."""
    head, _, port = endpoint.rpartition(":")
    if not engine:
        return endpoint
    return f"{head}:{int(port) + engine}" if port.isdigit() else f"{endpoint}-{engine}"


class KvPublisher:
    """Used from the loop only."""

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
        self._asked: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._asked = self._context.socket(zmq.ROUTER)
            self._asked.setsockopt(zmq.LINGER, 0)
            # What is more it drops, saying nothing: room for all that can be asked for, and the end.
            self._asked.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
            self._open(self._asked, address_for(config.replay_endpoint, engine))
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
            raise ConfigError(f"--kv-events-config: {address} cannot be used ({error.strerror})") from None

    def publish(self, batch: bytes) -> None:
        """Publish an encoded batch under the next number."""
        self._local.send(batch)

    def close(self) -> None:
        """Publish what was given, and close the sockets."""
        self._local.send(b"")
        self._thread.join(1.0)
        self._local.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._batches, zmq.POLLIN)
        if self._asked is not None:
            poller.register(self._asked, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._asked is not None and self._asked in ready:
                self._answer(self._asked)
            if self._batches in ready:
                batch = self._batches.recv()
                if not batch:
                    break
                numbered = number.to_bytes(8, "big"), batch
                self._published.send_multipart((self._topic, *numbered))
                self._kept.append(numbered)
                number += 1
        for socket in (self._batches, self._published, self._asked):
            if socket is not None:
                socket.close()

    def _answer(self, asked: zmq.Socket[bytes]) -> None:
        """Send what is kept from the number on that somebody asks for."""
        who, *_, first = asked.recv_multipart()
        for numbered in self._kept:
            if numbered[0] >= first:
                asked.send_multipart((who, b"", self._topic, *numbered))
        asked.send_multipart((who, b"", b"", END, b""))
