"""Collectives of ranks on several hosts, without the network: each host has its own memory, which receives the others' rows."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import msgspec
import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.distributed.hosts.host_collectives import HostCollectives
from quintet.executor.distributed.hosts.link import LinkEnd, LinkReceiver, LinkSender
from quintet.executor.distributed.hosts.messages import (
    CollectiveRows,
    CollectivesDone,
    InvalidMessage,
    LinkOrder,
)
from quintet.executor.distributed.parallel.library import CRanksShape, OrderKind, open_ranks_library
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import Share
from quintet.wire.config import ExecutorConfig, HostsConfig

WIDTH, TOKENS, VOCAB, GATHERED = 700, 5, 11, 12
DEADLINE_S = 60.0


def shape_of(size: int) -> CRanksShape:
    return CRanksShape(
        ranks=size, max_tokens=8, max_rows=8, max_outputs=8, tables=1, slots=8, table_stride=4, block_size=16,
        sums_width=WIDTH, logits_row_bytes=4 * VOCAB, gathered_row_bytes=4 * GATHERED, depth=1,
    )  # fmt: skip


class Group:
    """Ranks on several hosts, all in this process, and the messages between the hosts."""

    def __init__(self, size: int, count: int) -> None:
        hosts = HostsConfig(count=count, address="", key_file="")
        executor = ExecutorConfig(tensor_parallel_size=size, hosts=hosts)
        library, shape = open_ranks_library(), shape_of(size)
        memories = [os.memfd_create("ranks") for _ in range(count)]
        self.rung = threading.Event()
        self.ranks = [
            Ranks(memories[rank * count // size], Share(rank, size), shape, spins=0) for rank in range(size)
        ]
        self.collectives = [
            HostCollectives(library, memory, shape, executor, host, self.rung.set)
            for host, memory in enumerate(memories)
        ]
        self.carried: list[tuple[int, CollectivesDone | CollectiveRows]] = []
        self._decoder: msgspec.msgpack.Decoder[CollectivesDone | CollectiveRows] = msgspec.msgpack.Decoder(
            CollectivesDone | CollectiveRows
        )

    def carry(self) -> None:
        """Do the work of a hub and members after a wakeup."""
        self.rung.wait(0.05)
        self.rung.clear()
        for each in self.collectives:
            for other, frames in each.newly_completed():
                message = self._decoder.decode(frames[0])
                self.carried.append((other, message))
                if isinstance(message, CollectiveRows):
                    self.collectives[other].take_rows(message, memoryview(bytes(frames[1])))
                else:
                    self.collectives[other].take_done(message)

    def run(self, work: Callable[[Ranks], None]) -> None:
        """Run a function on each rank, and carry messages until all end."""
        threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in self.ranks]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.carry()


@pytest.fixture
def programs() -> ProgramLibrary:
    library = open_library()
    assert library is not None
    set_threads(library, 1, False)
    return ProgramLibrary(library)


@pytest.mark.parametrize(("size", "count"), [(2, 2), (4, 2), (3, 3)])
def test_every_rank_adds_the_rows_of_all_hosts(size: int, count: int, programs: ProgramLibrary) -> None:
    """More additions than buffers: a rank must not add the rows of a later layer."""
    rounds = 9
    sums = torch.randn(rounds, size, TOKENS, WIDTH)
    results = torch.zeros(rounds, size, TOKENS, WIDTH)

    def work(mine: Ranks) -> None:
        step = Step(programs, 8, 8)
        step.c.num_tokens = TOKENS
        rank, library = mine.share.rank, mine.library
        for turn in range(rounds):
            program = programs.new()
            place, y = library.sums(mine.handle, turn % 2, WIDTH), results[turn, rank]
            ctypes.memmove(place, sums[turn, rank].data_ptr(), TOKENS * WIDTH * 4)
            library.barrier(program, mine.handle, 0, place, WIDTH * 4, WIDTH * 4, 0)
            library.add_sums(program, mine.handle, turn % 2, WIDTH, None, None, y.data_ptr(), WIDTH, 2)
            programs.run(program, step.address, 0, programs.size(program))
            programs.delete(program)

    Group(size, count).run(work)
    for rank in range(size):
        assert torch.equal(results[:, rank], results[:, 0])
    if size == 4:
        assert torch.equal(results[:, 0], (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3]))
    else:
        assert torch.allclose(results[:, 0], sums.sum(1), atol=1e-5)


def test_columns_are_gathered_and_logits_go_to_the_first_rank(programs: ProgramLibrary) -> None:
    group = Group(2, 2)
    columns, logits = torch.randn(TOKENS, GATHERED), torch.randn(3, VOCAB)

    def work(mine: Ranks) -> None:
        step = Step(programs, 8, 8)
        step.c.num_tokens, step.c.num_outputs = TOKENS, 3
        program = programs.new()
        for extent, whole, place, for_first in (
            (0, columns, mine.gathered(0, GATHERED, torch.float32), 0),
            (1, logits, mine.logits(torch.float32), 1),
        ):
            width = whole.shape[1]
            kept = mine.share.of(width)
            own = place[: len(whole), kept.begin : kept.end]
            own.copy_(whole[:, kept.begin : kept.end])
            rows = (own.data_ptr(), kept.count * 4, width * 4, for_first)
            mine.library.barrier(program, mine.handle, extent, *rows)
        programs.run(program, step.address, 0, programs.size(program))
        programs.delete(program)

    group.run(work)
    for each in group.ranks:
        assert torch.equal(each.gathered(0, GATHERED, torch.float32)[:TOKENS], columns)
    first, second = (each.logits(torch.float32)[:3] for each in group.ranks)
    assert torch.equal(first, logits) and (second[:, : VOCAB // 2] == 0).all()
    sent = [(other, type(message)) for other, message in group.carried]
    assert (sent.count((0, CollectiveRows)), sent.count((1, CollectiveRows))) == (2, 1)


def leave(programs: ProgramLibrary, mine: Ranks) -> None:
    """Run one collective with sums."""
    step, program = Step(programs, 8, 8), programs.new()
    step.c.num_tokens = TOKENS
    place = mine.library.sums(mine.handle, 0, WIDTH)
    mine.library.barrier(program, mine.handle, 0, place, WIDTH * 4, WIDTH * 4, 0)
    programs.run(program, step.address, 0, 1)
    programs.delete(program)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"row_bytes": 0}, 16), ({"row_bytes": -16}, 16), ({}, 15), ({}, 0), ({"stride": 8}, 16),
        ({"offset": 0}, 16), ({"offset": -1}, 16), ({"offset": 1 << 40}, 16), ({"stride": 1 << 40}, 32),
    ],
)  # fmt: skip
def test_invalid_rows_are_rejected(changes: dict[str, int], size: int, programs: ProgramLibrary) -> None:
    group = Group(2, 2)
    group.run(lambda mine: leave(programs, mine))
    right = next(message for to, message in group.carried if to == 0 and isinstance(message, CollectiveRows))
    group.collectives[0].take_rows(right, memoryview(bytes(2 * right.row_bytes)))
    right = msgspec.structs.replace(right, row_bytes=16, stride=16)
    with pytest.raises(InvalidMessage, match="sent rows"):
        group.collectives[0].take_rows(msgspec.structs.replace(right, **changes), memoryview(bytes(size)))


def test_orders_reach_ranks_on_both_hosts_and_wait_for_all() -> None:
    """Two of four ranks are on another host; the orders are not those of a stage."""
    shape, library = shape_of(4), open_ranks_library()
    here, there = os.memfd_create("here"), os.memfd_create("there")
    rung = threading.Event()
    receiver = LinkReceiver(LinkEnd(library, here, shape, 1, [2, 3], is_last=False, is_within=True), rung.set)
    sender = LinkSender(LinkEnd(library, there, shape, 1, [0, 1], is_last=False, is_within=True), rung.set)
    first, *others = (Ranks(here if rank < 2 else there, Share(rank, 4), shape, spins=0) for rank in range(4))
    orders = [
        (OrderKind.EMBEDS, b"twelve bytes"),
        (OrderKind.COPY_BLOCKS, b"a pair's"),
        (OrderKind.IDLE_TASK, b""),
    ] * 2
    received: list[list[tuple[int, bytes]]] = [[], [], []]
    carried_out: list[list[int]] = []

    def send_all() -> None:
        first.wait_for_all()
        for kind, items in orders:
            if items:
                first.send_items(kind, items, len(items))
            else:
                first.send_idle_task()
            first.wait_for_all()
            carried_out.append([len(each) for each in received])

    def receive(rank: int) -> None:
        mine, step = others[rank], ctypes.create_string_buffer(4096)
        mine.done()
        for kind, _ in orders:
            order = mine.receive(step)
            received[rank].append((order.kind, mine.items(order) if kind is not OrderKind.IDLE_TASK else b""))
            mine.done()

    threads = [threading.Thread(target=send_all, daemon=True)]
    threads += [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rung.wait(0.05)
        rung.clear()
        done = sender.newly_done()
        if done is not None:
            receiver.done(done)
        taken = receiver.take()
        if taken is not None:
            order, content, payload = taken
            sender.send_order(order, memoryview(content), memoryview(bytes(payload)))
    assert received == [orders] * 3
    assert carried_out == [[count + 1] * 3 for count in range(len(orders))]
    unknown = LinkOrder(1, (OrderKind.MOVE_EXPERT, 0, 8, 0, 0, 0, 0))
    with pytest.raises(InvalidMessage, match="sent an invalid order on link 1"):
        sender.send_order(unknown, memoryview(bytes(8)), memoryview(b""))


def test_a_skipped_collective_is_rejected() -> None:
    group = Group(2, 2)
    group.collectives[0].take_done(CollectivesDone(1, 0, 1))
    for collectives in (1, 3, -1):
        with pytest.raises(InvalidMessage, match=f"reports collective {collectives} after 1"):
            group.collectives[0].take_done(CollectivesDone(1, 0, collectives))
