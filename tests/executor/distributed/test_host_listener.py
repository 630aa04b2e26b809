"""Admission of hosts by the first host: refusals have a one-line reason, and no host waits forever."""

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
from tests.executor.distributed.test_rank_processes import EXECUTOR_ID, config_of

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
    HostParts,
    HostRefused,
    Join,
    LinkOrder,
    LinkProgress,
    Welcome,
)
from quintet.executor.distributed.parallel.follower_processes import ChildIdentity, ExpectedEnd
from quintet.executor.kv_transfer.kv_identity import parts_of, sources
from quintet.executor.kv_transfer.peers.keys import Context, read_key
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig, HostsConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import WorkerId

__all__ = ["hosts"]
TIMEOUT_MS = 30_000


class HubBench:
    """A hub in a thread, its result, and its clients."""

    def __init__(self, config: EngineConfig, *, epoch: int = EXECUTOR_ID.epoch) -> None:
        assert config.executor.hosts is not None
        self.hosts = config.executor.hosts
        links = [os.memfd_create("link") for _ in range(config.executor.pipeline_parallel_size)]
        self.hub = Hub(ChildIdentity(WorkerId(EXECUTOR_ID.role, EXECUTOR_ID.index, epoch), 0), config, links)
        self.parts = parts_of(config, RUNNER)
        self._context = Context()
        self._clients: list[Client] = []
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
        assert self._ended.wait(TIMEOUT_MS / 1000)
        return str(self._error)

    def client(self) -> Client:
        client = Client(self.hosts, self._context)
        self._clients.append(client)
        return client

    def member(self) -> Client:
        """Return a client that is a member of the group."""
        client = self.client()
        client.send(Join(VERSION, 1, sources()))
        assert isinstance(client.receive(), Welcome)
        client.send(HostParts(self.parts))
        assert isinstance(client.receive(), Begin)
        return client

    def close(self) -> None:
        """Stop the hub by the loss of a member."""
        for client in self._clients:
            client.close()
        if not self._ended.wait(0.3):
            self.member().socket.close()
        self.ending()
        self._context.destroy(linger=0)


class Client:
    """A client with the group key that sends arbitrary messages."""

    def __init__(self, settings: HostsConfig, context: Context) -> None:
        self.socket = context.socket(zmq.DEALER)
        read_key(settings.key_file, *GROUP_KEY).protect(self.socket, listens=False)
        self.socket.setsockopt(zmq.IPV6, int(settings.address.startswith("[")))
        self.socket.connect(f"tcp://{settings.address}")

    def close(self) -> None:
        self.socket.close()

    def send(self, message: msgspec.Struct, *frames: bytes) -> None:
        self.socket.send_multipart([encode(message), *frames])

    def receive(self) -> Any:
        """Return the next message that is not a heartbeat."""
        while True:
            assert self.socket.poll(TIMEOUT_MS), "no message arrived"
            [frame] = self.socket.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=FromHub)
            if not isinstance(message, HostHeartbeat):
                return message


@pytest.fixture
def config(tmp_path: Path, hosts: HostsConfig) -> EngineConfig:
    return on(hosts, config_of(tmp_path, 1, stages=2))


@pytest.fixture
def hub_bench(config: EngineConfig) -> Iterator[HubBench]:
    with closing(HubBench(config)) as hub_bench:
        yield hub_bench


def test_a_host_receives_the_configuration_without_api_keys(config: EngineConfig) -> None:
    frontend = msgspec.structs.replace(config.frontend, api_keys=["sk-secret"], admin_key="sk-more")
    with closing(HubBench(msgspec.structs.replace(config, frontend=frontend))) as hub_bench:
        client = hub_bench.client()
        client.send(Join(VERSION, 1, sources()))
        welcome = client.receive()
        received = msgspec.json.decode(welcome.config, type=EngineConfig)
        assert b"sk-" not in welcome.config and config.run_dir.encode() not in welcome.config
        assert (received.executor.num_hosts, received.model.hf_config) == (2, config.model.hf_config)
        client.send(HostParts({}))
        refused = client.receive()
        assert refused.is_final and "weights" in refused.reason and "kernels" in refused.reason
        client.send(Join(VERSION, 1, sources()))
        assert isinstance(client.receive(), Welcome), "the host rank must be free again"
        client.send(HostParts(hub_bench.parts | {"instruction_set": "other"}))
        assert client.receive().reason.endswith(
            "set QUINTET_ISA to an instruction set that all processors have"
        )


def test_an_invalid_host_is_refused_with_a_reason_and_the_group_continues(hub_bench: HubBench) -> None:
    hub_bench.member()
    for join, words, is_final in (
        (Join(VERSION + 1, 1, sources()), "its version of Quintet differs", True),
        (Join(VERSION, 1, "other"), "its version of Quintet differs", True),
        (Join(VERSION, 2, sources()), "--node-rank must be 1 to 1", True),
        (Join(VERSION, 0, sources()), "--node-rank must be 1 to 1", True),
        (Join(VERSION, 1, sources()), "another host uses this --node-rank", False),
    ):
        other = hub_bench.client()
        other.send(join)
        answer = other.receive()
        assert isinstance(answer, HostRefused) and words in answer.reason and answer.is_final is is_final
    stranger = hub_bench.client()
    stranger.send(HostHeartbeat())
    stranger.socket.send(b"\xc1")
    stranger.send(Join(VERSION, 2, sources()))
    assert isinstance(stranger.receive(), HostRefused), "the invalid message must be ignored"


@pytest.mark.parametrize(
    ("message", "frames", "words"),
    [
        (
            LinkProgress(1, 0),
            (),
            "host 1 sent a message of foreign link 1",
        ),  # a link on which this host sends only
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
def test_an_invalid_message_of_a_member_ends_the_group(
    message: msgspec.Struct, frames: tuple[bytes, ...], words: str, hub_bench: HubBench
) -> None:
    hub_bench.member().send(message, *frames)
    assert words in hub_bench.ending()


def test_a_closed_connection_ends_the_group(hub_bench: HubBench) -> None:
    hub_bench.member().socket.close()
    assert hub_bench.ending() == "host 1 closed the connection"


def test_a_host_that_leaves_before_the_start_frees_its_rank(hub_bench: HubBench) -> None:
    client = hub_bench.client()
    client.send(Join(VERSION, 1, sources()))
    assert isinstance(client.receive(), Welcome)
    client.socket.close()
    answer: Any = None
    while not isinstance(answer, Welcome):  # until the hub has processed the close
        other = hub_bench.client()
        other.send(Join(VERSION, 1, sources()))
        answer = other.receive()
        assert isinstance(answer, Welcome) or not answer.is_final


def test_a_host_that_leaves_before_the_reply_ends_nothing(hub_bench: HubBench) -> None:
    for _ in range(20):  # some close before the reply is sent
        context = Context()
        with closing(Client(hub_bench.hosts, context)) as client:
            client.send(Join(VERSION, 1, sources()))
        context.term()  # after the message is sent
    answer: Any = None
    while not isinstance(answer, Welcome):  # until the hub has processed the last close
        client = hub_bench.client()
        client.send(Join(VERSION, 1, sources()))
        answer = client.receive()
        assert isinstance(answer, Welcome) or not answer.is_final


def test_a_message_in_the_name_of_another_host_ends_the_group(
    config: EngineConfig, hosts: HostsConfig, tmp_path: Path
) -> None:
    of_ranks = on(hosts, config_of(tmp_path, 2))
    for settings, message, words in (
        (of_ranks, CollectivesDone(0, 0, 1), "sent a message in the name of another host"),
        (of_ranks, CollectivesDone(1, 2, 1), "sent a message in the name of another host"),
        (of_ranks, CollectivesDone(1, 0, 2), "reports collective 2 after 0"),
        (of_ranks, LinkOrder(2, (0,) * 7), "sent a message of unknown link 2"),
        (config, CollectivesDone(1, 0, 1), "sent a collective, but there are no ranks on several hosts"),
    ):
        with closing(HubBench(settings)) as hub_bench:
            hub_bench.member().send(message, *[b""] * (2 * isinstance(message, LinkOrder)))
            assert hub_bench.ending() == f"host 1 {words}"


def test_a_missing_heartbeat_ends_the_group(config: EngineConfig) -> None:
    processes = msgspec.structs.replace(config.processes, stall_s=0.6)
    with closing(HubBench(msgspec.structs.replace(config, processes=processes))) as hub_bench:
        hub_bench.member()
        assert hub_bench.ending() == "host 1 sent nothing for 0.6 s"


def test_a_refused_member_logs_the_reason_in_one_line(hub_bench: HubBench, tmp_path: Path) -> None:
    own = place(hub_bench.hosts, tmp_path / "there")
    other = tmp_path / "other"
    other.write_bytes(b"o" * 32)
    others = msgspec.structs.replace(hub_bench.hosts, key_file=str(other))
    with raises(HostLost, "failed: its --group-key differs"):
        run(msgspec.structs.replace(own, hosts=others))
    with raises(ConfigError, "the first host refused this host: --node-rank must be 1 to 1"):
        run(msgspec.structs.replace(own, host=2))
    with raises(ConfigError, "this host has 0 MiB of memory, but its part needs"):
        run(msgspec.structs.replace(own, available_bytes=1))


def test_a_member_with_a_used_rank_may_retry(hub_bench: HubBench, tmp_path: Path) -> None:
    hub_bench.member()
    with raises(ExpectedEnd, "another host uses this --node-rank"):
        run(place(hub_bench.hosts, tmp_path / "there"))


def run(own: MemberSettings) -> None:
    with closing(Member(own)) as member:
        member.run()


def raises(kind: type[Exception], words: str) -> AbstractContextManager[object]:
    return pytest.raises(kind, match=re.escape(words))


def test_an_address_of_another_machine_is_rejected(config: EngineConfig) -> None:
    assert config.executor.hosts is not None
    far = msgspec.structs.replace(config.executor.hosts, address="192.0.2.1:29501")
    with raises(ConfigError, "--master-addr 192.0.2.1 --master-port 29501: "):
        HubBench(on(far, config))


def test_a_restarted_group_waits_for_its_address(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known, asked_for = socket.getaddrinfo, []

    def lost_once(name: str, *rest: Any, **named: Any) -> Any:
        asked_for.append(name)
        if len(asked_for) == 1:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", lost_once)
    with closing(HubBench(config, epoch=2)) as hub_bench:
        hub_bench.member()
    assert "Name or service not known; retrying" in caplog.text


@pytest.mark.parametrize("name", ["::1", "localhost"])
def test_hosts_connect_to_a_name_and_to_an_ipv6_address(
    name: str, config: EngineConfig, tmp_path: Path
) -> None:
    assert config.executor.hosts is not None
    port = config.executor.hosts.address.rpartition(":")[2]
    address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    there = msgspec.structs.replace(config.executor.hosts, address=address)
    with closing(HubBench(on(there, config))) as hub_bench:
        hub_bench.member()
        with raises(ExpectedEnd, "another host uses this --node-rank"):
            run(place(there, tmp_path / "there"))


def test_a_member_logs_a_missing_hub_and_joins_when_it_starts(
    config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.executor.hosts is not None
    own = place(config.executor.hosts, tmp_path / "there", host=2)
    errors: list[str] = []

    def join() -> None:
        try:
            run(own)
        except ConfigError as error:
            errors.append(str(error))

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    while "cannot reach the first host" not in caplog.text:
        joining.join(0.05)
        assert joining.is_alive()
    with closing(HubBench(config)):
        joining.join(TIMEOUT_MS / 1000)
    assert errors == ["the first host refused this host: --node-rank must be 1 to 1, since --nnodes is 2"]


def test_a_silent_address_is_followed_by_the_next(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.executor.hosts is not None
    own = place(config.executor.hosts, tmp_path / "there", host=2)
    monkeypatch.setattr(member_module, "JOIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(HubBench(config)) as hub_bench:
        addresses = [f"tcp://127.0.0.1:{silent.getsockname()[1]}", f"tcp://{hub_bench.hosts.address}"]
        monkeypatch.setattr(member_module, "endpoints_of", lambda address: addresses)
        with raises(ConfigError, "--node-rank must be 1 to 1"):
            run(own)
