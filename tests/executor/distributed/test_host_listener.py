"""Whom the first host lets take part, and how the others are told no: one line each, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.executor.distributed.test_host_processes import hosts, on, place
from tests.executor.distributed.test_rank_processes import ME, config_of

from quintet.executor.distributed.hosts import member as member_module
from quintet.executor.distributed.hosts.hub import Hub
from quintet.executor.distributed.hosts.member import Member, MemberSettings
from quintet.executor.distributed.hosts.messages import (
    GROUP_KEY,
    RUNNER,
    VERSION,
    Begin,
    CollectivesDone,
    FromHub,
    HostHeartbeat,
    HostLost,
    Join,
    LinkOrder,
    LinkProgress,
    Parts,
    Refused,
    Welcome,
)
from quintet.executor.distributed.parallel.child import ChildIdentity, ExpectedEnd
from quintet.executor.kv_transfer.kv_identity import parts_of, sources
from quintet.executor.kv_transfer.peers.keys import Context, read_key
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig, HostsConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import WorkerId

__all__ = ["hosts"]
PATIENCE_MS = 30_000


class Door:
    """A hub in a thread, how it ended, and those who knock."""

    def __init__(self, config: EngineConfig, *, epoch: int = ME.epoch) -> None:
        assert config.executor.hosts is not None
        self.hosts = config.executor.hosts
        links = [os.memfd_create("link") for _ in range(config.executor.pipeline_parallel_size)]
        self.hub = Hub(ChildIdentity(WorkerId(ME.role, ME.index, epoch), 0), config, links)
        self.parts = parts_of(config, RUNNER)
        self._context = Context()
        self._guests: list[Guest] = []
        self._ended = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.hub.run()
        except HostLost as error:
            self._error = error
        self.hub.close()
        self._ended.set()

    def ending(self) -> str:
        assert self._ended.wait(PATIENCE_MS / 1000)
        return str(self._error)

    def guest(self) -> Guest:
        guest = Guest(self.hosts, self._context)
        self._guests.append(guest)
        return guest

    def member(self) -> Guest:
        """Return one that takes part."""
        guest = self.guest()
        guest.say(Join(VERSION, 1, sources()))
        assert isinstance(guest.hear(), Welcome)
        guest.say(Parts(self.parts))
        assert isinstance(guest.hear(), Begin)
        return guest

    def close(self) -> None:
        """End the hub as the loss of a host does."""
        for guest in self._guests:
            guest.close()
        if not self._ended.wait(0.3):
            self.member().socket.close()
        self.ending()
        self._context.destroy(linger=0)


class Guest:
    """Somebody who knows the key, and says what a test wants."""

    def __init__(self, told: HostsConfig, context: Context) -> None:
        self.socket = context.socket(zmq.DEALER)
        read_key(told.key_file, *GROUP_KEY).protect(self.socket, listens=False)
        self.socket.setsockopt(zmq.IPV6, int(told.address.startswith("[")))
        self.socket.connect(f"tcp://{told.address}")

    def close(self) -> None:
        self.socket.close()

    def say(self, message: msgspec.Struct, *frames: bytes) -> None:
        self.socket.send_multipart([encode(message), *frames])

    def hear(self) -> Any:
        """Return what comes next and is not a beat."""
        while True:
            assert self.socket.poll(PATIENCE_MS), "nothing came"
            [frame] = self.socket.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=FromHub)
            if not isinstance(message, HostHeartbeat):
                return message


@pytest.fixture
def config(tmp_path: Path, hosts: HostsConfig) -> EngineConfig:
    return on(hosts, config_of(tmp_path, 1, stages=2))


@pytest.fixture
def door(config: EngineConfig) -> Iterator[Door]:
    with closing(Door(config)) as door:
        yield door


def test_a_host_is_told_what_is_computed_and_none_of_the_keys(config: EngineConfig) -> None:
    frontend = msgspec.structs.replace(config.frontend, api_keys=["sk-secret"], admin_key="sk-more")
    with closing(Door(msgspec.structs.replace(config, frontend=frontend))) as door:
        guest = door.guest()
        guest.say(Join(VERSION, 1, sources()))
        welcome = guest.hear()
        told = msgspec.json.decode(welcome.config, type=EngineConfig)
        assert b"sk-" not in welcome.config and config.run_dir.encode() not in welcome.config
        assert (told.executor.num_hosts, told.model.card) == (2, config.model.card)
        guest.say(Parts({}))
        refused = guest.hear()
        assert refused.is_final and "weights" in refused.reason and "kernels" in refused.reason
        guest.say(Join(VERSION, 1, sources()))
        assert isinstance(guest.hear(), Welcome), "the place is free again"
        guest.say(Parts(door.parts | {"instruction_set": "other"}))
        assert guest.hear().reason.endswith("set QUINTET_ISA to an instruction set that all processors have")


def test_who_cannot_take_part_is_told_why_and_stops_nobody(door: Door) -> None:
    door.member()
    for join, words, is_final in (
        (Join(VERSION + 1, 1, sources()), "its version of Quintet differs", True),
        (Join(VERSION, 1, "other"), "its version of Quintet differs", True),
        (Join(VERSION, 2, sources()), "--node-rank must be 1 to 1", True),
        (Join(VERSION, 0, sources()), "--node-rank must be 1 to 1", True),
        (Join(VERSION, 1, sources()), "another host uses this --node-rank", False),
    ):
        other = door.guest()
        other.say(join)
        answer = other.hear()
        assert isinstance(answer, Refused) and words in answer.reason and answer.is_final is is_final
    stranger = door.guest()
    stranger.say(HostHeartbeat())
    stranger.socket.send(b"\xc1")
    stranger.say(Join(VERSION, 2, sources()))
    assert isinstance(stranger.hear(), Refused), "what made no sense was passed over"


@pytest.mark.parametrize(
    ("message", "frames", "words"),
    [
        (
            LinkProgress(1, 0),
            (),
            "host 1 sent a message of foreign link 1",
        ),  # which it tells, and does not hear
        (LinkProgress(7, 0), (), "host 1 sent a message of unknown link 7"),
        (LinkProgress(0, 3), (), "host 1 reports 3 finished orders of link 0, of 0 sent"),
        (LinkOrder(0, (0,) * 7), (b"", b""), "host 1 sent a message of foreign link 0"),
        (
            LinkOrder(1, (0, 0, 0, 0, 0, 1 << 40, 1 << 40)),
            (b"", b""),
            "host 1 sent an invalid order on link 1",
        ),
        (LinkOrder(1, (9, 0, 0, 0, 0, 0, 0)), (b"", b""), "host 1 sent an invalid order on link 1"),
        (LinkOrder(1, (0,) * 7), (b"",), "host 1 sent an invalid message"),
        (Join(VERSION, 1, ""), (), "host 1 sent an invalid message"),
    ],
)
def test_who_takes_part_and_says_what_cannot_be_ends_the_group(
    message: msgspec.Struct, frames: tuple[bytes, ...], words: str, door: Door
) -> None:
    door.member().say(message, *frames)
    assert words in door.ending()


def test_leaving_ends_the_group(door: Door) -> None:
    door.member().socket.close()
    assert door.ending() == "host 1 closed the connection"


def test_who_leaves_before_it_begins_leaves_its_place(door: Door) -> None:
    guest = door.guest()
    guest.say(Join(VERSION, 1, sources()))
    assert isinstance(guest.hear(), Welcome)
    guest.socket.close()
    answer: Any = None
    while not isinstance(answer, Welcome):  # until the hub has heard of it
        other = door.guest()
        other.say(Join(VERSION, 1, sources()))
        answer = other.hear()
        assert isinstance(answer, Welcome) or not answer.is_final


def test_who_is_gone_before_it_is_heard_ends_nothing(door: Door) -> None:
    for _ in range(20):  # of which some are gone before they are answered
        context = Context()
        with closing(Guest(door.hosts, context)) as guest:
            guest.say(Join(VERSION, 1, sources()))
        context.term()  # when it is sent
    answer: Any = None
    while not isinstance(answer, Welcome):  # until the hub has heard that the last is gone
        guest = door.guest()
        guest.say(Join(VERSION, 1, sources()))
        answer = guest.hear()
        assert isinstance(answer, Welcome) or not answer.is_final


def test_who_speaks_for_another_host_ends_the_group(
    config: EngineConfig, hosts: HostsConfig, tmp_path: Path
) -> None:
    of_ranks = on(hosts, config_of(tmp_path, 2))
    for told, said, words in (
        (of_ranks, CollectivesDone(0, 0, 1), "sent a message in the name of another host"),
        (of_ranks, CollectivesDone(1, 2, 1), "sent a message in the name of another host"),
        (of_ranks, CollectivesDone(1, 0, 2), "reports collective 2 after 0"),
        (of_ranks, LinkOrder(2, (0,) * 7), "sent a message of unknown link 2"),
        (config, CollectivesDone(1, 0, 1), "sent a collective, but there are no ranks on several hosts"),
    ):
        with closing(Door(told)) as door:
            door.member().say(said, *[b""] * (2 * isinstance(said, LinkOrder)))
            assert door.ending() == f"host 1 {words}"


def test_silence_ends_the_group(config: EngineConfig) -> None:
    processes = msgspec.structs.replace(config.processes, stall_s=0.6)
    with closing(Door(msgspec.structs.replace(config, processes=processes))) as door:
        door.member()
        assert door.ending() == "host 1 sent nothing for 0.6 s"


def test_a_member_says_in_a_line_why_it_cannot_take_part(door: Door, tmp_path: Path) -> None:
    own = place(door.hosts, tmp_path / "there")
    other = tmp_path / "other"
    other.write_bytes(b"o" * 32)
    others = msgspec.structs.replace(door.hosts, key_file=str(other))
    with asked(HostLost, "failed: its --group-key differs"):
        run(msgspec.structs.replace(own, hosts=others))
    with asked(ConfigError, "the first host refused this host: --node-rank must be 1 to 1"):
        run(msgspec.structs.replace(own, host=2))
    with asked(ConfigError, "this host has 0 MiB of memory, but its part needs"):
        run(msgspec.structs.replace(own, available_bytes=1))


def test_a_member_is_told_that_its_place_is_taken_and_may_ask_again(door: Door, tmp_path: Path) -> None:
    door.member()
    with asked(ExpectedEnd, "another host uses this --node-rank"):
        run(place(door.hosts, tmp_path / "there"))


def run(own: MemberSettings) -> None:
    with closing(Member(own)) as member:
        member.run()


def asked(kind: type[Exception], words: str) -> AbstractContextManager[object]:
    return pytest.raises(kind, match=re.escape(words))


def test_an_address_of_another_machine_is_refused(config: EngineConfig) -> None:
    assert config.executor.hosts is not None
    far = msgspec.structs.replace(config.executor.hosts, address="192.0.2.1:29501")
    with asked(ConfigError, "--master-addr 192.0.2.1 --master-port 29501: "):
        Door(on(far, config))


def test_a_group_that_was_there_waits_for_its_address(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known, asked_for = socket.getaddrinfo, []

    def lost_once(name: str, *rest: Any, **named: Any) -> Any:
        asked_for.append(name)
        if len(asked_for) == 1:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", lost_once)
    with closing(Door(config, epoch=2)) as door:
        door.member()
    assert "Name or service not known; retrying" in caplog.text


@pytest.mark.parametrize("name", ["::1", "localhost"])
def test_hosts_meet_at_a_name_and_at_an_address_of_ipv6(
    name: str, config: EngineConfig, tmp_path: Path
) -> None:
    assert config.executor.hosts is not None
    port = config.executor.hosts.address.rpartition(":")[2]
    address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    there = msgspec.structs.replace(config.executor.hosts, address=address)
    with closing(Door(on(there, config))) as door:
        door.member()
        with asked(ExpectedEnd, "another host uses this --node-rank"):
            run(place(there, tmp_path / "there"))


def test_a_member_says_that_nobody_is_there_and_finds_who_comes_later(
    config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.executor.hosts is not None
    own = place(config.executor.hosts, tmp_path / "there", host=2)
    told: list[str] = []

    def seek() -> None:
        try:
            run(own)
        except ConfigError as error:
            told.append(str(error))

    seeking = threading.Thread(target=seek, daemon=True)
    seeking.start()
    while "cannot reach the first host" not in caplog.text:
        seeking.join(0.05)
        assert seeking.is_alive()
    with closing(Door(config)):
        seeking.join(PATIENCE_MS / 1000)
    assert told == ["the first host refused this host: --node-rank must be 1 to 1, since --nnodes is 2"]


def test_an_address_where_somebody_is_silent_is_not_the_last_that_is_tried(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.executor.hosts is not None
    own = place(config.executor.hosts, tmp_path / "there", host=2)
    monkeypatch.setattr(member_module, "JOIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(Door(config)) as door:
        addresses = [f"tcp://127.0.0.1:{silent.getsockname()[1]}", f"tcp://{door.hosts.address}"]
        monkeypatch.setattr(member_module, "endpoints_of", lambda address: addresses)
        with asked(ConfigError, "--node-rank must be 1 to 1"):
            run(own)
