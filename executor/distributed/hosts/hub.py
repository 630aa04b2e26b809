"""The first host's hub process: ``python -m quintet.executor.distributed.hosts.hub``, started by rank 0.

It listens, admits each other host once, and carries orders between stages on different hosts; all traffic passes
through the hub. It exits when a host is lost, and all ranks exit with it. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quintet.executor.distributed.hosts.address import endpoints_of, is_ipv6
from quintet.executor.distributed.hosts.carrier import Carrier, Frames, largest_frame, read_head
from quintet.executor.distributed.hosts.messages import (
    BEAT_S,
    FAILED,
    GROUP_KEY,
    RUNNER,
    VERSION,
    Begin,
    Carried,
    CollectiveRows,
    CollectivesDone,
    FromMember,
    HostHeartbeat,
    HostLost,
    Join,
    LinkNote,
    LinkOrder,
    LinkProgress,
    OfLink,
    Parts,
    PayloadChunk,
    Refused,
    Senseless,
    Welcome,
)
from quintet.executor.distributed.hosts.topology import hearer_of, links_between, teller_of
from quintet.executor.distributed.parallel.child import ChildIdentity, be_child, numbers
from quintet.executor.kv_transfer.kv_identity import parts_of, sources
from quintet.executor.kv_transfer.peers.keys import Context, PeerAuthenticator, read_key
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ConfigError

BIND_S = 20.0
"""Limit on the time to bind the address at start, while a previous process holds it or the name is unknown."""
FIRST_EPOCH = 1
"""Epoch of an executor's first start."""
COMPLAINT_S = 60.0
"""Minimum interval between log lines about connections without the key."""
log = logging.getLogger("quintet")


@dataclass(slots=True)
class JoiningHost:
    """A host that sent `Join`."""

    host: int
    descriptor: int
    """File descriptor of its connection."""
    heard_s: float
    has_begun: bool = False


class Hub:
    """The hub's sockets and members. Used by one thread."""

    def __init__(self, slot: ChildIdentity, config: EngineConfig, links: Sequence[int]) -> None:
        """links: descriptors of the memory of links, or of ranks on several hosts. Raises `ConfigError`."""
        assert config.executor.hosts is not None
        hosts = config.executor.hosts
        self._config, self._epoch = config, slot.me.epoch
        self._sources, self._parts = sources(), parts_of(config, RUNNER)
        self._guests: dict[bytes, JoiningHost] = {}
        """Members by ZeroMQ routing id."""
        self._by_host: dict[int, bytes] = {}
        self._held: dict[int, list[Frames]] = {}
        """Frames for hosts that have not begun; no step waits for these."""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromMember)
        self._carrier = Carrier(config, 0, links, self._send_to)
        self._told_s = self._quiet_until_s = 0.0
        self._context = context = Context()
        key = read_key(hosts.key_file, *GROUP_KEY)
        self._doorman = PeerAuthenticator(context, key)
        self._door = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),  # the links' capacity bounds the queue
            (zmq.MAXMSGSIZE, largest_frame(config)),
        ):
            self._door.setsockopt(option, value)
        key.protect(self._door, listens=True)
        self._monitor: Any = self._door.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED)
        try:
            _bind(self._door, hosts.address, self._epoch)
        except ConfigError:
            self.close()
            raise
        log.info(
            "waiting for %d other hosts at %s; run on each: quintet serve MODEL --headless --node-rank N",
            hosts.count - 1, hosts.address,
        )  # fmt: skip

    def close(self) -> None:
        """Close the sockets."""
        self._door.disable_monitor()
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Carry messages until a host is lost. Raises `HostLost`."""
        poller = zmq.Poller()
        for each in (self._door, self._monitor, self._doorman.socket, self._carrier.fileno()):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(BEAT_S * 1000)))
            if self._doorman.socket in ready:
                self._doorman.answer()
            if self._monitor in ready:
                self._see_connection()
            if self._door in ready:
                self._hear()
            if self._carrier.fileno() in ready:
                self._carrier.send_all()
            now = time.monotonic()
            if now - self._told_s >= BEAT_S:
                self._told_s = now
                self._carrier.send_notes()
                for who in list(self._guests):
                    self._send(who, [encode(HostHeartbeat())])
                self._look_for_silence(now)

    def _hear(self) -> None:
        """Receive all waiting messages."""
        while True:
            try:
                who, *frames = self._door.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            guest = self._guests.get(who.bytes)
            try:
                message = read_head(self._decoder, frames)
                if guest is None:
                    self._admit(who, message)
                    continue
                guest.heard_s = time.monotonic()
                self._take(guest, who.bytes, message, frames)
            except Senseless as error:
                if guest is None:
                    log.warning("a connection to the hub %s", error)
                    continue
                raise HostLost(f"host {guest.host} {error}") from None

    def _admit(self, who: zmq.Frame, message: FromMember) -> None:
        """Admit a host that sent `Join`, or refuse it."""
        hosts = self._config.executor.hosts
        assert hosts is not None
        if not isinstance(message, Join):
            raise Senseless("sent an invalid message")
        if not 0 < message.host < hosts.count:
            words = f"--node-rank must be 1 to {hosts.count - 1}, since --nnodes is {hosts.count}"
            self._refuse(who.bytes, message.host, words)
        elif message.version != VERSION or message.sources != self._sources:
            self._refuse(who.bytes, message.host, "its version of Quintet differs; install the same version")
        elif message.host in self._by_host:
            self._refuse(who.bytes, message.host, "another host uses this --node-rank", is_final=False)
        else:
            descriptor: Any = who.get(zmq.SRCFD)
            self._guests[who.bytes] = JoiningHost(message.host, int(descriptor), time.monotonic())
            self._by_host[message.host] = who.bytes
            config = msgspec.json.encode(shown(self._config))
            self._send(who.bytes, [encode(Welcome(self._epoch, config))])

    def _refuse(self, who: bytes, host: int, words: str, *, is_final: bool = True) -> None:
        log.warning("host %d is refused: %s", host, words)
        self._send(who, [encode(Refused(words, is_final))])

    def _take(self, guest: JoiningHost, who: bytes, message: FromMember, frames: Frames) -> None:
        match message:
            case Parts() if not guest.has_begun:
                self._compare(guest, who, message)
            case (
                PayloadChunk()
                | LinkOrder()
                | LinkProgress()
                | LinkNote()
                | CollectiveRows()
                | CollectivesDone()
            ) if guest.has_begun:
                self._carry(guest, message, frames)
            case HostHeartbeat():
                pass
            case _:
                raise Senseless("sent an invalid message")

    def _compare(self, guest: JoiningHost, who: bytes, message: Parts) -> None:
        """Let a host begin if its weights and kernels are those of the first host; refuse it otherwise."""
        differing = [name for name, part in self._parts.items() if message.parts.get(name) != part]
        if not differing:
            self._send(who, [encode(Begin())])
            if who not in self._guests:
                return
            guest.has_begun = True
            log.info("host %d joined", guest.host)
            for frames in self._held.pop(guest.host, []):
                self._send(who, frames)
            return
        words = f"its {' and '.join(sorted(differing))} differ from the first host's"
        if differing == ["instruction_set"]:
            words += ": set QUINTET_ISA to an instruction set that all processors have"
        del self._guests[who], self._by_host[guest.host]
        self._refuse(who, guest.host, words)

    def _carry(self, guest: JoiningHost, message: Carried, frames: Frames) -> None:
        """Deliver a message to its destination host."""
        executor = self._config.executor
        if not isinstance(message, OfLink):
            if message.host != guest.host or message.to not in range(executor.num_hosts):
                raise Senseless("sent a message in the name of another host")
            receiver = message.to
        else:
            receiver = self._receiver(guest, message)
        if receiver == 0:
            self._carrier.take(message, frames)
        else:
            self._send_to(receiver, frames)

    def _receiver(self, guest: JoiningHost, message: OfLink) -> int:
        """Return the host at the other end of a link."""
        executor = self._config.executor
        if message.link not in links_between(executor):
            raise Senseless(f"sent a message of unknown link {message.link}")
        ends = teller_of(executor, message.link), hearer_of(executor, message.link)
        sender, receiver = ends if isinstance(message, PayloadChunk | LinkOrder) else ends[::-1]
        if sender != guest.host:
            raise Senseless(f"sent a message of foreign link {message.link}")
        return receiver

    def _send_to(self, host: int, frames: Frames) -> None:
        who = self._by_host.get(host)
        if who is not None and self._guests[who].has_begun:
            self._send(who, frames)
        else:
            self._held.setdefault(host, []).append(frames)

    def _send(self, who: bytes, frames: Frames) -> None:
        try:
            self._door.send_multipart([who, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if who in self._guests:
                self._lose(who, self._guests[who], f"is unreachable: {error.strerror}")

    def _see_connection(self) -> None:
        event: Any = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            for who, guest in list(self._guests.items()):
                if guest.descriptor == event["value"]:
                    self._lose(who, guest, "closed the connection")
        elif time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + COMPLAINT_S
            log.warning("rejected a connection to the hub: its %s is missing or differs", GROUP_KEY[0])

    def _look_for_silence(self, now: float) -> None:
        silent_s = self._config.processes.stall_s
        for who, guest in list(self._guests.items()):
            if now - guest.heard_s > silent_s:
                self._lose(who, guest, f"sent nothing for {silent_s:g} s")

    def _lose(self, who: bytes, guest: JoiningHost, words: str) -> None:
        """Fail if the host takes part; otherwise free its node rank."""
        if guest.has_begun:
            raise HostLost(f"host {guest.host} {words}")
        log.warning("host %d left before it began: it %s", guest.host, words)
        del self._guests[who], self._by_host[guest.host]


def shown(config: EngineConfig) -> EngineConfig:
    """Return the configuration for other hosts, without client keys and local paths."""
    replace, hosts = msgspec.structs.replace, config.executor.hosts
    assert hosts is not None
    return replace(
        config,
        run_dir="",
        model=replace(config.model, path="", tokenizer_path=""),
        executor=replace(config.executor, packed_cache=None, threads=0, hosts=replace(hosts, key_file="")),
        frontend=FrontendConfig(),
        trace=None,
        record=None,
    )


def _bind(door: zmq.Socket[bytes], address: str, epoch: int) -> None:
    """Bind the address only. Raises `ConfigError`.

    After the first epoch the address is known to be valid, so retry without limit; requests stay queued meanwhile.
    """
    is_known = epoch > FIRST_EPOCH
    until_s, said_s = time.monotonic() + BIND_S, 0.0
    while True:
        try:
            _bind_to_first(door, address)
            return
        except (OSError, zmq.ZMQError) as error:
            now = time.monotonic()
            if not is_known and (error.errno == zmq.EADDRNOTAVAIL or now > until_s):
                name, _, port = address.rpartition(":")
                raise ConfigError(
                    f"--master-addr {name} --master-port {port}: {error.strerror}; the first host listens there, so use"
                    " an address of this machine and a free port"
                ) from None
            if is_known and now - said_s > COMPLAINT_S:
                said_s = now
                log.warning("the hub cannot bind %s: %s; retrying", address, error.strerror)
        time.sleep(0.1)


def _bind_to_first(door: zmq.Socket[bytes], address: str) -> None:
    """Bind the first of the address's endpoints that this machine has. Raises `OSError` and `zmq.ZMQError`."""
    *others, last = endpoints_of(address)
    for endpoint in (*others, last):
        door.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))
        try:
            door.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if endpoint == last or error.errno != zmq.EADDRNOTAVAIL:
                raise


def _run(slot: ChildIdentity, config: EngineConfig, arguments: argparse.Namespace) -> None:
    memory = numbers(arguments.links or arguments.groups)
    with contextlib.closing(Hub(slot, config, memory)) as hub:
        hub.run()


if __name__ == "__main__":
    be_child("hub", _run)
