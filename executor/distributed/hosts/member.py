"""The process of a host that is not the first: ``python -m quintet.executor.distributed.hosts.member``.

``serve --headless`` starts it. It joins the hub, starts this host's ranks, and carries orders between local and
remote stages. It lives as long as its connection; the next epoch of the executor needs a new process. Imports no
torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import threading
import time
from typing import Any

import msgspec
import setproctitle
import zmq
from zmq.utils.monitor import recv_monitor_message

from quintet.executor.distributed.hosts.carrier import Carrier, Frames, read_head
from quintet.executor.distributed.hosts.messages import (
    BEAT_S,
    FAILED,
    GROUP_KEY,
    MOST_BYTES,
    RUNNER,
    VERSION,
    Begin,
    Carried,
    FromHub,
    HostHeartbeat,
    HostLost,
    HostParts,
    HostRefused,
    InvalidMessage,
    Join,
    Welcome,
)
from quintet.executor.distributed.hosts.topology import endpoints_of, is_ipv6
from quintet.executor.distributed.parallel.follower_processes import (
    ExpectedEnd,
    FollowerProcesses,
    begin_child,
    end_child,
)
from quintet.executor.kv_transfer.kv_identity import parts_of, sources
from quintet.executor.kv_transfer.peers.keys import Context, read_key
from quintet.process.child import error_file
from quintet.process.log import configure_logging
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig, HostsConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role, WorkerId

NAME = "member"
JOIN_S = 20.0
"""Time limit for the hub's answer to `Join`."""
TRY_S = 3.0
"""Connect timeout per address."""
WARNING_INTERVAL_S = 60.0
"""Minimum interval between log lines about an unreachable hub."""
log = logging.getLogger("quintet")


class MemberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Local settings of a host, passed as JSON through the member's standard input."""

    host: int
    """Node rank, from 1."""
    hosts: HostsConfig
    run_dir: str
    model_path: str
    packed_cache: str | None
    threads: int
    log_level: str
    available_bytes: int
    """Memory available for its ranks."""


class Member:
    """Used by the main thread only, because ranks are killed when the thread that started them exits."""

    def __init__(self, own: MemberSettings) -> None:
        """Raises `ConfigError` without a key."""
        self._own = own
        self._config: EngineConfig | None = None
        self._carrier: Carrier | None = None
        self._epoch = 0
        self._last_sent_s, self._last_received_s = 0.0, time.monotonic()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromHub)
        self._parts: HostParts | None = None
        self._context = context = Context()
        self._socket = context.socket(zmq.DEALER)
        self._poller = zmq.Poller()
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # the links' capacity bounds the queue
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.CONNECT_TIMEOUT, int(TRY_S * 1000)),
            (zmq.MAXMSGSIZE, MOST_BYTES),
        ):
            self._socket.setsockopt(option, value)
        read_key(own.hosts.key_file, *GROUP_KEY).protect(self._socket, listens=False)
        self._monitor: Any = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED
        )
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        self._is_connected = False
        """True if the ZeroMQ handshake has succeeded."""
        self._endpoint: str | None = None
        """The endpoint in use, or the last one tried."""
        self._num_tries = 0
        self._try_next_s, self._last_warning_s = 0.0, time.monotonic() - WARNING_INTERVAL_S + TRY_S

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Join, then compute and carry messages until the connection ends. Raises `HostLost`, or `ConfigError` if refused."""
        log.info("host %d joins at %s", self._own.host, self._own.hosts.address)
        while True:
            if not self._is_connected:
                self._connect_next(time.monotonic())
            ready = dict(self._poller.poll(int(BEAT_S * 1000)))
            if self._monitor in ready:
                self._handle_connection_event()
            if self._socket in ready:
                self._receive()
            if self._carrier is not None and self._carrier.fileno() in ready:
                self._carrier.send_all()
            self._send_and_check(time.monotonic())

    def _connect_next(self, now: float) -> None:
        """Connect to the next endpoint of the address, after the last one's timeout."""
        if now < self._try_next_s:
            return
        self._try_next_s = now + TRY_S
        address, reason = self._own.hosts.address, "connection refused or timed out"
        if self._endpoint is not None:
            self._socket.disconnect(self._endpoint)
            self._endpoint = None
        try:
            endpoints = endpoints_of(address)
            self._endpoint = endpoints[self._num_tries % len(endpoints)]
            self._num_tries += 1
            self._socket.setsockopt(zmq.IPV6, int(is_ipv6(self._endpoint)))
            self._socket.connect(self._endpoint)
        except (OSError, zmq.ZMQError) as error:
            reason = error.strerror or str(error)
        if now - self._last_warning_s >= WARNING_INTERVAL_S:
            self._last_warning_s = now
            log.warning(
                "host %d cannot reach the first host at %s: %s; retrying", self._own.host, address, reason
            )

    def _send_and_check(self, now: float) -> None:
        if not self._is_connected or now - self._last_sent_s < BEAT_S:
            return
        self._last_sent_s = now
        timeout_s = JOIN_S if self._config is None else self._config.processes.stall_s
        if now - self._last_received_s > timeout_s:
            raise HostLost(f"the first host sent nothing for {timeout_s:g} s")
        if self._config is None:
            return
        self._send(0, [encode(HostHeartbeat())])
        if self._parts is not None:
            self._send(0, [encode(self._parts)])
            self._parts = None
        if self._carrier is not None:
            self._carrier.send_notes()

    def _handle_connection_event(self) -> None:
        event: Any = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            self._try_next_s = time.monotonic() + JOIN_S  # the event may be of an earlier attempt
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected, self._last_received_s = True, time.monotonic()
            self._send(0, [encode(Join(VERSION, self._own.host, sources()))])
        elif event & FAILED or not self._is_connected:
            raise HostLost(
                f"handshake with {self._own.hosts.address} failed: its {GROUP_KEY[0]} differs, or it is not the first host"
            )
        else:
            raise HostLost("the first host closed the connection")

    def _send(self, host: int, frames: Frames) -> None:
        """Send to the hub, which delivers to every host."""
        self._socket.send_multipart(frames, copy=False)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._last_received_s = time.monotonic()
            try:
                self._take(read_head(self._decoder, frames), frames)
            except InvalidMessage as error:
                raise HostLost(f"the first host {error}") from None

    def _take(self, message: FromHub, frames: Frames) -> None:
        match message:
            case HostRefused(reason=reason, is_final=is_final):
                reason = f"the first host refused this host: {reason}"
                raise ConfigError(reason) if is_final else ExpectedEnd(reason)
            case Welcome() if self._config is None:
                self._configure(message)
            case Begin() if self._config is not None and self._carrier is None:
                self._begin(self._config)
            case _ if self._carrier is not None and isinstance(message, Carried):
                self._carrier.take(message, frames)
            case HostHeartbeat():
                pass
            case _:
                raise InvalidMessage("sent an invalid message")

    def _configure(self, message: Welcome) -> None:
        """Take the configuration from the hub, then determine this host's identity parts in a thread, since reading is slow."""
        own = self._own
        shared = msgspec.json.decode(message.config, type=EngineConfig)
        if shared.executor.num_hosts != own.hosts.count:
            raise InvalidMessage("sent a configuration with another --nnodes")
        replace = msgspec.structs.replace
        config = replace(
            shared,
            run_dir=own.run_dir,
            log_level=own.log_level,
            model=replace(shared.model, path=own.model_path),
            executor=replace(
                shared.executor, threads=own.threads, packed_cache=own.packed_cache, hosts=own.hosts
            ),
        )
        check_memory(config, own.available_bytes)
        self._epoch, self._config = message.epoch, config
        threading.Thread(target=self._find_parts, args=(config,), name="identity", daemon=True).start()

    def _find_parts(self, config: EngineConfig) -> None:
        try:
            self._parts = HostParts(parts_of(config, RUNNER))
        except Exception as error:  # noqa: BLE001 - such as an unreadable checkpoint
            end_child(error, error_file(self._own.run_dir, NAME), f"host {self._own.host}", at_once=True)

    def _begin(self, config: EngineConfig) -> None:
        """Start the ranks of this host."""
        me, own = WorkerId(Role.EXECUTOR, 0, self._epoch), self._own
        followers = FollowerProcesses(me, config, own.host)
        self._carrier = Carrier(
            config, own.host, followers.memory.links or followers.memory.stages, self._send
        )
        self._poller.register(self._carrier.fileno(), zmq.POLLIN)
        log.info("host %d begins: starting %d ranks", own.host, config.executor.ranks_per_host)


def check_memory(config: EngineConfig, available_bytes: int) -> None:
    """Raise `ConfigError` if this host's memory is too small for its part; the first host checks only itself."""
    executor = config.executor
    weights = executor.weight_bytes * executor.ranks_per_host
    spec = config.model.kv  # without the draft model, which the first host has
    num_bytes = spec.num_blocks(config.cache.memory_bytes) * spec.offloaded_bytes_per_block
    kv = num_bytes * executor.num_kv_memories // executor.num_hosts
    if weights + kv > available_bytes:
        raise ConfigError(
            f"this host has {available_bytes >> 20} MiB of memory, but its part needs {weights >> 20} MiB for weights and"
            f" {kv >> 20} MiB for KV: lower --kv-cache-memory on the first host, or use more hosts"
        )


def main() -> None:
    """Run a member until its connection ends or it fails."""
    parser = argparse.ArgumentParser(
        description="Run one host of a model on several hosts; started by quintet serve --headless."
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    begin_child(parser.parse_args().parent)
    own = msgspec.json.decode(sys.stdin.buffer.read(), type=MemberSettings)
    setproctitle.setproctitle(f"quintet-host-{own.host}")
    configure_logging(f"host-{own.host}", own.log_level)
    try:
        with contextlib.closing(Member(own)) as member:
            member.run()
    except Exception as error:  # noqa: BLE001 - the local ranks exit with this process
        end_child(error, error_file(own.run_dir, NAME), f"host {own.host}")


if __name__ == "__main__":
    main()
