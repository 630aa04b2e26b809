"""The process of the first host that the others talk with: ``python -m quintet.executor.distributed.hosts.hub``,
started by rank 0.

Listens, admits each other host once, and carries what their stages and this host's tell each other: what one of the others tells
another passes through here. Ends when one is lost, and with it all ranks. Imports no torch.
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
"""So long the address may still be the one's who had it before, or its name be unknown, when a server starts."""
FIRST_EPOCH = 1
"""Of an executor that has not been there before."""
COMPLAINT_S = 60.0
"""Between two lines of the log that say that somebody knocks who has no key."""
log = logging.getLogger("quintet")


@dataclass(slots=True)
class JoiningHost:
    """A host that has asked to take part."""

    host: int
    descriptor: int
    """Of its connection."""
    heard_s: float
    has_begun: bool = False


class Hub:
    """Used in one thread."""

    def __init__(self, slot: ChildIdentity, config: EngineConfig, links: Sequence[int]) -> None:
        """links: descriptors of the memory of links, or of ranks that are on several hosts. Raises `ConfigError`."""
        assert config.executor.hosts is not None
        hosts = config.executor.hosts
        self._config, self._epoch = config, slot.me.epoch
        self._sources, self._parts = sources(), parts_of(config, RUNNER)
        self._guests: dict[bytes, JoiningHost] = {}
        """By how ZeroMQ calls the connection."""
        self._by_host: dict[int, bytes] = {}
        self._held: dict[int, list[Frames]] = {}
        """What hosts are to hear once they have begun: who is there already, and nothing that a step waits for."""
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
            (zmq.SNDHWM, 0),  # there is never more under way than links hold
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
            "waiting for %d other hosts at %s, of whom each runs: quintet serve MODEL --headless --node-rank N",
            hosts.count - 1, hosts.address,
        )  # fmt: skip

    def close(self) -> None:
        """Close the sockets."""
        self._door.disable_monitor()
        self._context.destroy(linger=0)

    def run(self) -> None:
        """Carry for ever. Raises `HostLost`."""
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
        """Read what is there."""
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
                    log.warning("somebody at the hosts' door %s", error)
                    continue
                raise HostLost(f"host {guest.host} {error}") from None

    def _admit(self, who: zmq.Frame, message: FromMember) -> None:
        """Let a host take part that was not known."""
        hosts = self._config.executor.hosts
        assert hosts is not None
        if not isinstance(message, Join):
            raise Senseless("says what makes no sense")
        if not 0 < message.host < hosts.count:
            words = f"this is a group of --nnodes {hosts.count}: --node-rank is 1 to {hosts.count - 1}"
            self._refuse(who.bytes, message.host, words)
        elif message.version != VERSION or message.sources != self._sources:
            self._refuse(who.bytes, message.host, "it is another version of Quintet; install the same")
        elif message.host in self._by_host:
            self._refuse(who.bytes, message.host, "another with this --node-rank is there", is_final=False)
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
                raise Senseless("says what makes no sense")

    def _compare(self, guest: JoiningHost, who: bytes, message: Parts) -> None:
        """Have a host begin that would compute the same."""
        differing = [name for name, part in self._parts.items() if message.parts.get(name) != part]
        if not differing:
            self._send(who, [encode(Begin())])
            if who not in self._guests:
                return
            guest.has_begun = True
            log.info("host %d is there", guest.host)
            for frames in self._held.pop(guest.host, []):
                self._send(who, frames)
            return
        words = f"its {' and '.join(sorted(differing))} differ from the first host's"
        if differing == ["instruction_set"]:
            words += ": set QUINTET_ISA to one that all processors have"
        del self._guests[who], self._by_host[guest.host]
        self._refuse(who, guest.host, words)

    def _carry(self, guest: JoiningHost, message: Carried, frames: Frames) -> None:
        """Give something to whom it is for."""
        executor = self._config.executor
        if not isinstance(message, OfLink):
            if message.host != guest.host or message.to not in range(executor.num_hosts):
                raise Senseless("speaks for another host")
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
            raise Senseless(f"speaks of link {message.link}")
        ends = teller_of(executor, message.link), hearer_of(executor, message.link)
        sender, receiver = ends if isinstance(message, PayloadChunk | LinkOrder) else ends[::-1]
        if sender != guest.host:
            raise Senseless(f"speaks of link {message.link}")
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
                self._lose(who, self._guests[who], f"cannot be reached: {error.strerror}")

    def _see_connection(self) -> None:
        event: Any = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            for who, guest in list(self._guests.items()):
                if guest.descriptor == event["value"]:
                    self._lose(who, guest, "has closed the connection")
        elif time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + COMPLAINT_S
            log.warning("somebody at the hosts' door has another %s, or none", GROUP_KEY[0])

    def _look_for_silence(self, now: float) -> None:
        silent_s = self._config.processes.stall_s
        for who, guest in list(self._guests.items()):
            if now - guest.heard_s > silent_s:
                self._lose(who, guest, f"has been silent for {silent_s:g} s")

    def _lose(self, who: bytes, guest: JoiningHost, words: str) -> None:
        """End with a host that takes part; the place of another is free again."""
        if guest.has_begun:
            raise HostLost(f"host {guest.host} {words}")
        log.warning("host %d, which had not begun, %s", guest.host, words)
        del self._guests[who], self._by_host[guest.host]


def shown(config: EngineConfig) -> EngineConfig:
    """Return what other hosts are told of the configuration: no keys of clients, no paths of this machine."""
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
    """Listen at the address, and no other. Raises `ConfigError`.

    Where a group has been before, the address was right: what is missing comes back, and requests are kept until then.
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
                    f"--master-addr {name} --master-port {port}: {error.strerror}; the first host listens there, so it must be"
                    " an address of this machine, and a port that is free"
                ) from None
            if is_known and now - said_s > COMPLAINT_S:
                said_s = now
                log.warning("the hosts cannot meet at %s: %s; trying again", address, error.strerror)
        time.sleep(0.1)


def _bind_to_first(door: zmq.Socket[bytes], address: str) -> None:
    """Listen at the first of its addresses that this machine has. Raises `OSError` and `zmq.ZMQError`."""
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
