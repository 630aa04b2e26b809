"""A pipeline link between two hosts, without the network: the orders of one end arrive at the other, as with shared memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.distributed.hosts.link import LinkEnd, LinkReceiver, LinkSender
from quintet.executor.distributed.hosts.messages import InvalidMessage, LinkOrder
from quintet.executor.distributed.parallel.library import (
    COrder,
    CRanksShape,
    Note,
    OrderKind,
    StepPart,
    open_ranks_library,
)
from quintet.executor.distributed.parallel.ranks import RECEIVER, SENDER, Ranks
from quintet.executor.model_config.share import Share

MAX_TOKENS, WIDTH, OUTPUTS, VOCAB = 8, 6, 4, 10
OBSERVED_BYTES = 4 * 3 * WIDTH
"""Of a token's hidden states that a draft head reads."""
DEADLINE_S = 60.0


def shape_of(*, is_last: bool) -> CRanksShape:
    logits_bytes = 4 * VOCAB * OUTPUTS + OBSERVED_BYTES * MAX_TOKENS
    return CRanksShape(
        ranks=2, max_tokens=MAX_TOKENS, max_rows=4, max_outputs=OUTPUTS, tables=2, slots=4, table_stride=4,
        block_size=4, depth=2, payload_bytes=logits_bytes if is_last else 4 * WIDTH * MAX_TOKENS,
    )  # fmt: skip


class Bridge:
    """Two stages in this process, and the link between them."""

    def __init__(self, *, is_last: bool = False) -> None:
        library, shape = open_ranks_library(), shape_of(is_last=is_last)
        here, there = os.memfd_create("here"), os.memfd_create("there")

        def view(memory: int, share: Share) -> Ranks:
            return Ranks(memory, share, shape, spins=0)

        self.sending_rank, self.receiving_rank = view(here, SENDER), view(there, RECEIVER)
        self.wakeup = threading.Event()
        ends = [
            LinkEnd(library, memory, shape, 0, [rank], is_last=is_last, observed_bytes=OBSERVED_BYTES)
            for memory, rank in ((here, 1), (there, 0))
        ]
        self.receiver = LinkReceiver(ends[0], self.wakeup.set)
        self.sender = LinkSender(ends[1], self.wakeup.set)

    def carry(self) -> tuple[LinkOrder, bytes, memoryview] | None:
        """Do the work of a `Carrier` and its network after a wakeup; return the order that was sent, if any."""
        assert self.wakeup.wait(DEADLINE_S)
        self.wakeup.clear()
        orders = self.sender.newly_done()
        if orders is not None:
            self.receiver.done(orders)
        taken = self.receiver.take()
        if taken is not None:
            order, content, payload = taken
            self.sender.send_order(order, memoryview(content), memoryview(bytes(payload)))
        return taken


def host_library() -> ctypes.CDLL:
    library = open_library()
    assert library is not None
    return library


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def a_step(library: ProgramLibrary) -> Step:
    """Return two rows: three tokens of slot 2 from position 5, one of slot 0 at 0; both tables of each."""
    step = Step(library, MAX_TOKENS, 4)
    for name, values in {
        "token_ids": [7, 8, 9, 3], "positions": [5, 6, 7, 0], "row_slots": [2, 0], "row_starts": [5, 0],
        "row_counts": [3, 1], "row_offsets": [0, 3], "output_tokens": [2, 3],
    }.items():  # fmt: skip
        step.columns[name][: len(values)] = values
    tables = np.arange(2 * 4 * 4, dtype=np.int32).reshape(2, 4, 4)
    step.columns["tables"] = tables  # keeps them alive
    step.c.num_tokens, step.c.num_rows, step.c.num_outputs = 4, 2, 2
    step.c.block_table, step.c.block_table_stride, step.c.block_table_group_stride = (
        tables.ctypes.data,
        4,
        16,
    )
    return step


def column(address: int | None, count: int, kind: type) -> list[int]:
    return list((kind * count).from_address(address or 0))


def test_a_step_is_sent_with_tables_and_hidden_states() -> None:
    bridge, programs = Bridge(), ProgramLibrary(host_library())
    sent, received = a_step(programs), Step(programs, MAX_TOKENS, 4)
    hidden = torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH)
    bridge.sending_rank.payload(WIDTH, torch.float32)[:4] = hidden
    bridge.sending_rank.send_run(sent.address, StepPart.LAYERS, StepPart.END, 8)
    bridge.receiving_rank.done()  # is ready
    while bridge.carry() is None:
        pass
    order = bridge.receiving_rank.receive(received.address)
    assert (order.kind, order.begin, order.end, order.length) == (
        OrderKind.RUN,
        StepPart.LAYERS,
        StepPart.END,
        8,
    )
    c = received.c
    assert (c.num_tokens, c.num_rows, c.num_outputs) == (4, 2, 2)
    assert column(c.token_ids, 4, ctypes.c_int32) == [7, 8, 9, 3]
    for name, values in (("positions", [5, 6, 7, 0]), ("row_slots", [2, 0]), ("row_counts", [3, 1])):
        assert column(getattr(c, name), len(values), ctypes.c_int64) == values
    assert column(c.output_tokens, 2, ctypes.c_int64) == [2, 3]
    tables = np.ctypeslib.as_array(
        (ctypes.c_int32 * (2 * 4 * 4)).from_address(c.block_table or 0), shape=(32,)
    ).reshape(2, 4, 4)
    assert tables[:, 2, :2].tolist() == [[8, 9], [24, 25]]
    assert tables[:, 0, :2].tolist() == [[0, 1], [16, 17]]
    assert torch.equal(bridge.receiving_rank.payload(WIDTH, torch.float32)[:4], hidden)


def test_orders_in_flight_are_limited_as_on_one_host() -> None:
    """The third order waits until the first was executed on the other host; the sender then sees that all were."""
    bridge, step = Bridge(), Step(ProgramLibrary(host_library()), MAX_TOKENS, 4)
    pairs = [np.array([[i, i + 1]], np.int32).tobytes() for i in range(3)]

    def send_all() -> None:
        bridge.sending_rank.wait_for_all()
        for each in pairs:
            bridge.sending_rank.send_items(OrderKind.COPY_BLOCKS, each, 8)
        bridge.sending_rank.wait_for_all()

    sending_rank = in_background(send_all)
    bridge.receiving_rank.done()
    for count in range(2):
        while bridge.carry() is None:
            pass
        order = bridge.receiving_rank.receive(step.address)
        assert bridge.receiving_rank.items(order) == pairs[count]
    assert bridge.receiver.take() is None, "a third order exceeds the depth"
    bridge.receiving_rank.done()
    while bridge.carry() is None:
        pass
    assert bridge.receiving_rank.items(bridge.receiving_rank.receive(step.address)) == pairs[2]
    bridge.receiving_rank.done()
    while sending_rank.is_alive():
        bridge.wakeup.wait(0.05)
        bridge.wakeup.set()
        bridge.carry()


@pytest.mark.parametrize("tokens", [0, 5, MAX_TOKENS])
def test_logits_of_all_outputs_are_returned_with_hidden_states_of_all_tokens(tokens: int) -> None:
    bridge, width = Bridge(is_last=True), OBSERVED_BYTES // 4
    logits, observed = torch.rand(3, VOCAB), torch.rand(tokens, width)
    bridge.sending_rank.payload(VOCAB, torch.float32)[:3] = logits
    bridge.sending_rank.payload(width, torch.float32, logits.nbytes)[:tokens] = observed
    bridge.sending_rank.send_done(3, tokens)
    bridge.receiving_rank.done()
    taken = None
    while taken is None:
        taken = bridge.carry()
    assert len(taken[2]) == logits.nbytes + observed.nbytes
    order = bridge.receiving_rank.receive(ctypes.create_string_buffer(4096))
    assert (order.kind, order.num_outputs, order.num_tokens) == (OrderKind.RUN, 3, tokens)
    assert torch.equal(bridge.receiving_rank.payload(VOCAB, torch.float32)[:3], logits)
    received = bridge.receiving_rank.payload(width, torch.float32, logits.nbytes)[:tokens]
    assert torch.equal(received, observed)


def test_logits_of_more_tokens_than_a_step_has_are_rejected() -> None:
    bridge = Bridge(is_last=True)
    fields = {"kind": OrderKind.RUN, "num_tokens": MAX_TOKENS + 1}
    order = LinkOrder(0, tuple(fields.get(name, 0) for name, _ in COrder._fields_))
    bridge.receiving_rank.done()
    while bridge.sender.newly_done() is None:
        bridge.wakeup.wait(0.05)
    with pytest.raises(InvalidMessage, match="sent an invalid order on link 0"):
        bridge.sender.send_order(order, memoryview(b""), memoryview(bytes(OBSERVED_BYTES * (MAX_TOKENS + 1))))


def test_notes_of_a_stage_are_copied_to_the_other_host() -> None:
    bridge = Bridge()
    bridge.receiving_rank.note(Note.PROGRESS, 7)
    bridge.receiving_rank.note(Note.IDLE_TASKS, 1)
    bridge.receiver.note(*bridge.sender.notes())
    assert (bridge.sending_rank.noted(Note.PROGRESS), bridge.sending_rank.noted(Note.IDLE_TASKS)) == (7, 1)


def test_invalid_orders_are_rejected() -> None:
    bridge = Bridge()
    step = a_step(ProgramLibrary(host_library()))
    bridge.sending_rank.send_run(step.address, StepPart.LAYERS, StepPart.END, 8)
    taken = None
    while taken is None:
        bridge.wakeup.wait(DEADLINE_S)
        taken = bridge.receiver.take()
    valid, content, payload = taken[0], taken[1], bytes(taken[2])
    fields = valid.order
    slots = 4 * 4 + 4 * 8  # after token ids and positions

    def changed(at: int, value: int) -> bytes:
        return content[:at] + value.to_bytes(8, "little", signed=True) + content[at + 8 :]

    def order(**values: int) -> LinkOrder:
        names = ("kind", "begin", "end", "length", "num_tokens", "num_rows", "num_outputs")
        return LinkOrder(0, tuple(values.get(name, field) for name, field in zip(names, fields, strict=True)))

    bridge.receiving_rank.done()
    while bridge.sender.newly_done() is None:
        bridge.wakeup.wait(0.05)
    for what, sent, arrays, states in (
        ("too short", valid, content[:-4], payload),
        ("too long", valid, content + b"\0" * 4, payload),
        ("no arrays", valid, b"", payload),
        ("hidden states of fewer tokens", valid, content, payload[:-4]),
        ("a slot that is not there", valid, changed(slots, 4), payload),
        ("a slot before the first", valid, changed(slots, -1), payload),
        ("a position beyond every table", valid, changed(slots + 16, 1 << 40), payload),
        ("more tokens in a row than in the step", valid, changed(slots + 32, 4), payload),
        ("an output that is no token", valid, changed(slots + 64, 4), payload),
        ("more tokens than there is room for", order(num_tokens=MAX_TOKENS + 1), content, payload),
        ("rows below zero", order(num_rows=-1), content, payload),
        ("no part of a step", order(begin=2), content, payload),
        ("an order of ranks within a stage", order(kind=OrderKind.EMBEDS), content, payload),
        ("half a pair", order(kind=OrderKind.COPY_BLOCKS, end=4), b"\0" * 4, b""),
        ("more items than it says", order(kind=OrderKind.COPY_BLOCKS, end=8), b"\0" * 16, b""),
    ):
        with pytest.raises(InvalidMessage, match="link 0"):
            bridge.sender.send_order(sent, memoryview(arrays), memoryview(states))
            pytest.fail(what)
    bridge.sender.take_chunk(memoryview(payload)[:4])
    with pytest.raises(InvalidMessage, match=f"sent {len(payload) + 4} bytes of payload on link 0"):
        bridge.sender.send_order(valid, memoryview(content), memoryview(payload))
    with pytest.raises(InvalidMessage, match="more payload on link 0 than an order can have"):
        bridge.sender.take_chunk(memoryview(bytes(4 * WIDTH * MAX_TOKENS)))
    bridge.sender.send_order(valid, memoryview(content), memoryview(payload)[4:])
    bridge.sender.send_order(valid, memoryview(content), memoryview(payload))
    with pytest.raises(InvalidMessage, match="more orders on link 0 than its depth"):
        bridge.sender.take_chunk(memoryview(payload))
    with pytest.raises(InvalidMessage, match="more orders on link 0 than its depth"):
        bridge.sender.send_order(valid, memoryview(content), memoryview(payload))
    with pytest.raises(InvalidMessage, match="reports 2 finished orders of link 0, of 1 sent"):
        bridge.receiver.done(2)
