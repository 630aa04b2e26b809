"""The first host's hub process: ``python -m quintet.executor.distributed.hosts.hub``, started by rank 0.

It listens, admits each other host once, and carries orders between stages on different hosts; all traffic passes
through the hub. It exits when a host is lost, and all ranks exit with it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quintet.executor.distributed.hosts.carrier import Carrier, Frames, largest_frame, read_head
from quintet.executor.distributed.hosts.messages import (
    BEAT_S,
    FAILED,
    GROUP_KEY,
    RUNNER,
    VERSION,
    Begin,
    Carried,
    FromMember,
    HostHeartbeat,
    HostLost,
    HostParts,
    HostRefused,
    InvalidMessage,
    Join,
    LinkMessage,
    LinkOrder,
    PayloadChunk,
    Welcome,
)
from quintet.executor.distributed.hosts.topology import (
    endpoints_of,
    is_ipv6,
    links_between,
    receiver_host,
    sender_host,
)
from quintet.executor.distributed.parallel.follower_processes import ChildIdentity, run_child
from quintet.executor.kv_transfer.kv_identity import parts_of, sources
from quintet.executor.kv_transfer.peers.keys import Context, PeerAuthenticator, read_key
from quintet.process.log import LogLimit
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ConfigError

BIND_S = 20.0
"""Limit on the time to bind the address at start, while a previous process holds it or the name is unknown."""
FIRST_EPOCH = 1
"""Epoch of an executor's first start."""
WARNING_INTERVAL_S = 60.0
"""Minimum interval between log lines about connections without the key."""
log = logging.getLogger("quintet")


@dataclass(slots=True)
class JoiningHost:
    """A host that sent `Join`."""

    host: int
    descriptor: int
    """File descriptor of its connection."""
    last_received_s: float
    has_begun: bool = False


class Hub:
    """The hub's sockets and members. Used by one thread."""

    def __init__(self, slot: ChildIdentity, config: EngineConfig, links: Sequence[int]) -> None:
        """links: descriptors of the memory of links, or of ranks on several hosts. Raises `ConfigError`."""
        assert config.executor.hosts is not None
        hosts = config.executor.hosts
        self._config, self._epoch = config, slot.me.epoch
        self._sources, self._parts = sources(), parts_of(config, RUNNER)
        self._members: dict[bytes, JoiningHost] = {}
        """Members by ZeroMQ routing id."""
        self._by_host: dict[int, bytes] = {}
        self._pending_frames: dict[int, list[Frames]] = {}
        """Frames for hosts that have not begun; no step waits for these."""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromMember)
        self._carrier = Carrier(config, 0, links, self._send_to)
        self._last_sent_s, self._rejected_connections = 0.0, LogLimit()
        self._context = context = Context()
        key = read_key(hosts.key_file, *GROUP_KEY)
        self._authenticator = PeerAuthenticator(context, key)
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),  # the links' capacity bounds the queue
            (zmq.MAXMSGSIZE, largest_frame(config)),
        ):
            self._socket.setsockopt(option, value)
        key.protect(self._socket, listens=True)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED)
        try:
            _bind(self._socket, hosts.address, self._epoch)
        except ConfigError:
            self.close()
            raise
        log.info(
            "waiting for %d other hosts at %s; run on each: quintet serve MODEL --headless --node-rank N",
            hosts.count - 1, hosts.address,
        )  # fmt: skip

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Carry messages until a host is lost. Raises `HostLost`."""
        poller = zmq.Poller()
        for each in (self._socket, self._monitor, self._authenticator.socket, self._carrier.fileno()):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(BEAT_S * 1000)))
            if self._authenticator.socket in ready:
                self._authenticator.answer()
            if self._monitor in ready:
                self._handle_connection_event()
            if self._socket in ready:
                self._receive()
            if self._carrier.fileno() in ready:
                self._carrier.send_all()
            now = time.monotonic()
            if now - self._last_sent_s >= BEAT_S:
                self._last_sent_s = now
                self._carrier.send_notes()
                for routing_id in list(self._members):
                    self._send(routing_id, [encode(HostHeartbeat())])
                self._check_heartbeats(now)

    def _receive(self) -> None:
        """Receive all waiting messages."""
        while True:
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            member = self._members.get(routing_id.bytes)
            try:
                message = read_head(self._decoder, frames)
                if member is None:
                    self._admit(routing_id, message)
                    continue
                member.last_received_s = time.monotonic()
                self._take(member, routing_id.bytes, message, frames)
            except InvalidMessage as error:
                if member is None:
                    log.warning("a connection to the hub %s", error)
                    continue
                raise HostLost(f"host {member.host} {error}") from None

    def _admit(self, routing_id: zmq.Frame, message: FromMember) -> None:
        """Admit a host that sent `Join`, or refuse it."""
        hosts = self._config.executor.hosts
        assert hosts is not None
        if not isinstance(message, Join):
            raise InvalidMessage("sent an invalid message")
        if not 0 < message.host < hosts.count:
            reason = f"--node-rank must be 1 to {hosts.count - 1}, since --nnodes is {hosts.count}"
            self._refuse(routing_id.bytes, message.host, reason)
        elif message.version != VERSION or message.sources != self._sources:
            self._refuse(
                routing_id.bytes, message.host, "its version of Quintet differs; install the same version"
            )
        elif message.host in self._by_host:
            self._refuse(routing_id.bytes, message.host, "another host uses this --node-rank", is_final=False)
        else:
            descriptor: Any = routing_id.get(zmq.SRCFD)
            self._members[routing_id.bytes] = JoiningHost(message.host, int(descriptor), time.monotonic())
            self._by_host[message.host] = routing_id.bytes
            config = msgspec.json.encode(shown(self._config))
            self._send(routing_id.bytes, [encode(Welcome(self._epoch, config))])

    def _refuse(self, routing_id: bytes, host: int, reason: str, *, is_final: bool = True) -> None:
        log.warning("host %d is refused: %s", host, reason)
        self._send(routing_id, [encode(HostRefused(reason, is_final))])

    def _take(self, member: JoiningHost, routing_id: bytes, message: FromMember, frames: Frames) -> None:
        match message:
            case HostParts() if not member.has_begun:
                self._compare(member, routing_id, message)
            case _ if member.has_begun and isinstance(message, Carried):
                self._forward(member, message, frames)
            case HostHeartbeat():
                pass
            case _:
                raise InvalidMessage("sent an invalid message")

    def _compare(self, member: JoiningHost, routing_id: bytes, message: HostParts) -> None:
        """Let a host begin if its weights and kernels are those of the first host; refuse it otherwise."""
        differing = [name for name, part in self._parts.items() if message.parts.get(name) != part]
        if not differing:
            self._send(routing_id, [encode(Begin())])
            if routing_id not in self._members:
                return
            member.has_begun = True
            log.info("host %d joined", member.host)
            for frames in self._pending_frames.pop(member.host, []):
                self._send(routing_id, frames)
            return
        reason = f"its {' and '.join(sorted(differing))} differ from the first host's"
        if differing == ["instruction_set"]:
            reason += ": set QUINTET_ISA to an instruction set that all processors have"
        del self._members[routing_id], self._by_host[member.host]
        self._refuse(routing_id, member.host, reason)

    def _forward(self, member: JoiningHost, message: Carried, frames: Frames) -> None:
        """Deliver a message to its destination host."""
        executor = self._config.executor
        if not isinstance(message, LinkMessage):
            if message.host != member.host or message.to not in range(executor.num_hosts):
                raise InvalidMessage("sent a message in the name of another host")
            receiver = message.to
        else:
            receiver = self._receiver(member, message)
        if receiver == 0:
            self._carrier.take(message, frames)
        else:
            self._send_to(receiver, frames)

    def _receiver(self, member: JoiningHost, message: LinkMessage) -> int:
        """Return the host at the other end of a link."""
        executor = self._config.executor
        if message.link not in links_between(executor):
            raise InvalidMessage(f"sent a message of unknown link {message.link}")
        ends = sender_host(executor, message.link), receiver_host(executor, message.link)
        sender, receiver = ends if isinstance(message, PayloadChunk | LinkOrder) else ends[::-1]
        if sender != member.host:
            raise InvalidMessage(f"sent a message of foreign link {message.link}")
        return receiver

    def _send_to(self, host: int, frames: Frames) -> None:
        routing_id = self._by_host.get(host)
        if routing_id is not None and self._members[routing_id].has_begun:
            self._send(routing_id, frames)
        else:
            self._pending_frames.setdefault(host, []).append(frames)

    def _send(self, routing_id: bytes, frames: Frames) -> None:
        try:
            self._socket.send_multipart([routing_id, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if routing_id in self._members:
                self._drop_member(routing_id, self._members[routing_id], f"is unreachable: {error.strerror}")

    def _handle_connection_event(self) -> None:
        event: Any = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            for routing_id, member in list(self._members.items()):
                if member.descriptor == event["value"]:
                    self._drop_member(routing_id, member, "closed the connection")
        elif self._rejected_connections.count():
            log.warning("rejected a connection to the hub: its %s is missing or differs", GROUP_KEY[0])

    def _check_heartbeats(self, now: float) -> None:
        timeout_s = self._config.processes.stall_s
        for routing_id, member in list(self._members.items()):
            if now - member.last_received_s > timeout_s:
                self._drop_member(routing_id, member, f"sent nothing for {timeout_s:g} s")

    def _drop_member(self, routing_id: bytes, member: JoiningHost, reason: str) -> None:
        """Fail if the host takes part; otherwise free its node rank."""
        if member.has_begun:
            raise HostLost(f"host {member.host} {reason}")
        log.warning("host %d left before it began: it %s", member.host, reason)
        del self._members[routing_id], self._by_host[member.host]


def shown(config: EngineConfig) -> EngineConfig:
    """Return the configuration for other hosts, without client keys and local paths."""
    replace, hosts, speculative = msgspec.structs.replace, config.executor.hosts, config.scheduler.speculative
    assert hosts is not None
    if speculative is not None and speculative.draft is not None:
        draft = replace(speculative.draft.model, path="", tokenizer_path="")
        speculative = replace(speculative, draft=replace(speculative.draft, model=draft))
    return replace(
        config,
        run_dir="",
        model=replace(config.model, path="", tokenizer_path=""),
        scheduler=replace(config.scheduler, speculative=speculative),
        executor=replace(config.executor, packed_cache=None, threads=0, hosts=replace(hosts, key_file="")),
        frontend=FrontendConfig(),
        trace=None,
        record=None,
    )


def _bind(socket: zmq.Socket[bytes], address: str, epoch: int) -> None:
    """Bind the address only. Raises `ConfigError`.

    After the first epoch the address is known to be valid, so retry without limit; requests stay queued meanwhile.
    """
    is_known = epoch > FIRST_EPOCH
    until_s, last_warning_s = time.monotonic() + BIND_S, 0.0
    while True:
        try:
            _bind_to_first(socket, address)
            return
        except (OSError, zmq.ZMQError) as error:
            now = time.monotonic()
            if not is_known and (error.errno == zmq.EADDRNOTAVAIL or now > until_s):
                name, _, port = address.rpartition(":")
                raise ConfigError(
                    f"--master-addr {name} --master-port {port}: {error.strerror}; the first host listens there, so use"
                    " an address of this machine and a free port"
                ) from None
            if is_known and now - last_warning_s > WARNING_INTERVAL_S:
                last_warning_s = now
                log.warning("the hub cannot bind %s: %s; retrying", address, error.strerror)
        time.sleep(0.1)


def _bind_to_first(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind the first of the address's endpoints that this machine has. Raises `OSError` and `zmq.ZMQError`."""
    *others, last = endpoints_of(address)
    for endpoint in (*others, last):
        socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if endpoint == last or error.errno != zmq.EADDRNOTAVAIL:
                raise


def _run(slot: ChildIdentity, config: EngineConfig) -> None:
    with contextlib.closing(Hub(slot, config, slot.memory.links or slot.memory.stages)) as hub:
        hub.run()


if __name__ == "__main__":
    run_child("hub", _run)
