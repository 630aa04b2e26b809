"""Inboxes and outboxes over real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Cancel, Drain, Seat, SeatState, StopHit
from quintet.wire.sockets import Inbox, Peers, address_of, make_run_dir


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def test_messages_arrive_in_order_and_typed(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    worker = WorkerId(Role.CORE, 0, 1)
    inbox: Inbox[Cancel] = Inbox(context, address_of(tmp_path, worker), Cancel)
    peers = Peers(context)
    peers.connect(worker, inbox.address)
    for i in range(100):
        assert peers.send(Role.CORE, 0, Cancel([i], 0))
    received: list[Cancel] = []
    while len(received) < 100:
        batch = inbox.wait(5.0)
        assert batch, "nothing arrived for 5 s"
        received += batch
    assert [message.request_ids[0] for message in received] == list(range(100))
    peers.close()
    inbox.close()


def test_noise_is_counted_and_dropped(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    worker = WorkerId(Role.CORE, 0, 1)
    inbox: Inbox[Cancel] = Inbox(context, address_of(tmp_path, worker), Cancel)
    peers = Peers(context)
    peers.connect(worker, inbox.address)
    peers.send_frame(Role.CORE, 0, b"\xc1 not msgpack")
    peers.send(Role.CORE, 0, StopHit(b""))
    peers.send(Role.CORE, 0, Cancel([1], 0))
    received: list[Cancel] = []
    while not received:
        received = inbox.wait(5.0)
    assert received == [Cancel([1], 0)]
    assert inbox.num_rejected == 2
    peers.close()
    inbox.close()


def test_what_was_queued_for_a_dead_epoch_never_reaches_its_successor(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    first, second = WorkerId(Role.EXECUTOR, 0, 1), WorkerId(Role.EXECUTOR, 0, 2)
    peers = Peers(context)
    peers.connect(first, address_of(tmp_path, first))
    peers.send(Role.EXECUTOR, 0, Cancel([1], 0))
    inbox: Inbox[Cancel] = Inbox(context, address_of(tmp_path, second), Cancel)
    replaced = peers.follow([Seat(second, inbox.address, 1, SeatState.READY)])
    assert replaced == [second]
    peers.send(Role.EXECUTOR, 0, Cancel([2], 0))
    assert inbox.wait(5.0) == [Cancel([2], 0)]
    peers.close()
    inbox.close()


def test_a_send_to_nobody_says_so(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    peers = Peers(context)
    assert not peers.send(Role.FRONTEND, 4, Drain())
    peers.close()


def test_the_run_dir_is_private(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    assert run_dir.stat().st_mode & 0o777 == 0o700
