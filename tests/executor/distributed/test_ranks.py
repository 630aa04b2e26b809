"""Ranks: their rows and columns of a tensor, and their barriers and additions."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import CStep, Step
from quintet.executor.checkpoints.quant.row_ranges import RowRange
from quintet.executor.distributed.parallel.library import CRanksShape, OrderKind, RanksLibrary
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.shapes import link_shape, shape_of
from quintet.executor.model_config.share import KeptRange, Share

DEPTH = 6
DEADLINE_S = 60.0


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "part",
    [
        RowRange("all", 12),
        RowRange("transposed", 12, transposed=True),
        RowRange("after others", 12, total=30, begin=10),
        RowRange("of each group", 12, total=36, begin=2, groups=3),
        RowRange("lengths", 12, unit_rows=True),
    ],
    ids=lambda part: part.name,
)
def test_the_rows_of_all_ranks_form_the_part(part: RowRange, size: int) -> None:
    tensor = torch.arange(part.height * DEPTH).float().view(part.weight_shape(DEPTH)) + 1
    bias = torch.arange(part.height)
    shares = [part.keeping(Share(rank, size).of(12)) for rank in range(size)]
    assert torch.equal(torch.cat([share.weight(tensor) for share in shares]), part.weight(tensor))
    assert torch.equal(torch.cat([share.bias(bias) for share in shares]), part.bias(bias))
    assert all(share.weight_shape(DEPTH) == part.weight_shape(DEPTH) for share in shares)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_columns_of_all_ranks_form_the_part(transposed: bool) -> None:
    part = RowRange("down", 4, transposed=transposed)
    tensor = torch.arange(4 * DEPTH).view(part.weight_shape(DEPTH))
    shares = [part.of_inputs(Share(rank, 2).of(DEPTH), 1) for rank in range(2)]
    assert torch.equal(torch.cat([share.weight(tensor) for share in shares], 1), part.weight(tensor))
    assert all(share.weight_shape(DEPTH // 2) == part.weight_shape(DEPTH) for share in shares)


def test_a_kv_head_is_on_all_ranks_with_its_queries() -> None:
    assert [Share(rank, 4).of_kv_heads(2) for rank in range(4)] == [
        KeptRange(0, 1, 2), KeptRange(0, 1, 2), KeptRange(1, 2, 2), KeptRange(1, 2, 2),
    ]  # fmt: skip
    assert Share(1, 2).of_kv_heads(4) == KeptRange(2, 4, 4)


def test_uneven_sizes_are_divided() -> None:
    kept = [Share(rank, 3).of(211) for rank in range(3)]
    assert [each.begin for each in kept] == [0, *(each.end for each in kept[:-1])]
    assert kept[-1].end == 211 and {each.count for each in kept} == {70, 71}


WIDTH, ROWS = 700, 5
"""Two pieces of a row."""


def ranks_of(size: int, memory: int | None = None, spins: int = 0, depth: int = 1) -> list[Ranks]:
    """Return all ranks of one memory, in this process. depth: maximum orders in flight."""
    shape = CRanksShape(
        ranks=size, max_tokens=8, max_rows=8, max_outputs=8, tables=1, slots=8, table_stride=4,
        block_size=16, sums_width=WIDTH, logits_row_bytes=64, rotated_row_bytes=0, gathered_row_bytes=0, depth=depth,
    )  # fmt: skip
    memory = os.memfd_create("ranks") if memory is None else memory
    return [Ranks(memory, Share(rank, size), shape, spins=spins) for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_rank_adds_all_sums_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    """Twice as many additions as sum buffers: a rank must not add the sums of the next layer."""
    code = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    library = open_library()
    assert library is not None
    set_threads(library, 1, False)
    programs, size, rounds = ProgramLibrary(library), 3, 4
    ranks = ranks_of(size)
    bias, residual = torch.randn(WIDTH).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    sums = torch.randn(rounds, size, ROWS, WIDTH)
    results = torch.zeros(rounds, size, ROWS, WIDTH, dtype=dtype)

    def compute(rank: int) -> None:
        mine = ranks[rank]
        step = Step(programs, 8, 8)
        step.c.num_tokens = ROWS
        for turn in range(rounds):
            program = programs.new()
            place = mine.library.sums(mine.handle, turn % 2, WIDTH)
            ctypes.memmove(place, sums[turn, rank].data_ptr(), ROWS * WIDTH * 4)
            mine.library.barrier(program, mine.handle, 0, None, 0, 0, 0)
            y = results[turn, rank]
            mine.library.add_sums(
                *(program, mine.handle, turn % 2, WIDTH, bias.data_ptr(), residual.data_ptr()),
                *(y.data_ptr(), WIDTH, code),
            )
            programs.run(program, step.address, 0, programs.size(program))
            programs.delete(program)

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = ((sums[:, 0] + sums[:, 1]) + sums[:, 2] + bias.float()).to(dtype)
    expected = (total.float() + residual.float()).to(dtype)
    for rank in range(size):
        assert torch.equal(results[:, rank], expected), rank


def test_orders_with_items_are_sent_without_waiting_up_to_the_depth() -> None:
    """Blocks are copied and swapped while the pipeline stays full."""
    sender, receiver = ranks_of(2, depth=2)
    receiver.done()  # is ready
    sent = (bytes(range(8)), bytes(range(8, 24)))

    def send_all() -> None:
        for items in sent:
            sender.send_items(OrderKind.COPY_BLOCKS, items, 8)

    thread = threading.Thread(target=send_all, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the sender waits for an order that was not received"
    for items in sent:
        assert receiver.items(receiver.receive(ctypes.byref(CStep()))) == items
        receiver.done()


LINES, LINE_BYTES, COUNTER = 64, 256, 64
"""Offsets of the barrier counters: after the order counter, in the second part of each rank's line."""


@pytest.mark.parametrize("spins", [0, 4000])
def test_barriers_continue_after_their_counter_wraps(spins: int) -> None:
    library = open_library()
    assert library is not None
    programs, size, rounds, last = ProgramLibrary(library), 3, 6, 2**32 - 3
    memory = os.memfd_create("ranks")
    ranks = ranks_of(size, memory, spins)
    for rank in range(size):
        os.pwrite(memory, last.to_bytes(4, "little"), LINES + rank * LINE_BYTES + COUNTER)
    arrived = [0] * size
    late: list[int] = []

    def barrier(mine: Ranks) -> None:
        step = Step(programs, 8, 8)
        step.c.num_tokens = 1
        program = programs.new()
        mine.library.barrier(program, mine.handle, 0, None, 0, 0, 0)
        for turn in range(1, rounds + 1):
            arrived[mine.share.rank] = turn
            programs.run(program, step.address, 0, 1)
            late.extend(rank for rank in range(size) if arrived[rank] < turn)
        programs.delete(program)

    threads = [threading.Thread(target=barrier, args=(each,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert late == []
    for rank in range(size):
        counter = int.from_bytes(os.pread(memory, 4, LINES + rank * LINE_BYTES + COUNTER), "little")
        assert counter == (last + rounds) % 2**32, "the barrier counter is at another offset"


@pytest.mark.parametrize("experts", [False, True])
def test_shared_memory_is_counted_as_mapped(experts: bool, tmp_path: Path) -> None:
    """Except items, step arrays and tables, which are no larger than the items."""
    library = open_library()
    assert library is not None
    routed = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2}
    model = write_model(tmp_path, vocab_size=50_000, **(routed if experts else {}))
    options = Options(
        model=str(model), load_format="dummy", device="cpu", max_num_seqs=8, max_model_len=64,
        max_num_batched_tokens=512, tensor_parallel_size=2, enable_expert_parallel=experts,
        enable_eplb=experts, eplb_config='{"num_redundant_experts": 2}' if experts else None,
    )  # fmt: skip
    config = resolve(options, tmp_path).config
    shape = shape_of(config)
    ranks = RanksLibrary(library)
    item_bytes = 4 * ranks.item_ints
    rest = ranks.num_bytes(ctypes.byref(shape)) - config.executor.shared_bytes
    assert item_bytes <= rest < 2 * item_bytes


def test_observed_hidden_states_are_counted_as_mapped(tmp_path: Path) -> None:
    """Those that a prediction layer reads, in the links of three stages."""
    library = open_library()
    assert library is not None
    family = {"architectures": ["MiMoForCausalLM"], "num_key_value_heads": 2, "num_hidden_layers": 3}
    model, ranks = write_model(tmp_path, **family), RanksLibrary(library)
    sizes = list[tuple[int, int]]()
    for drafts in (None, '{"method": "mtp", "num_speculative_tokens": 2}'):
        options = Options(
            model=str(model), load_format="dummy", device="cpu", max_num_seqs=8, max_model_len=64,
            max_num_batched_tokens=512, pipeline_parallel_size=3, speculative_config=drafts,
        )  # fmt: skip
        config = resolve(options, tmp_path).config
        shapes = [link_shape(config, link) for link in range(3)]
        mapped_bytes = sum(ranks.num_bytes(ctypes.byref(shape)) for shape in shapes)
        sizes.append((mapped_bytes, config.executor.shared_bytes))
    (mapped, counted), (mapped_with_drafts, counted_with_drafts) = sizes
    assert mapped_with_drafts - mapped == counted_with_drafts - counted == (2 + 2 + 4) * 512 * 64 * 2


def test_each_order_is_received_with_its_step() -> None:
    library = open_library()
    assert library is not None
    programs = ProgramLibrary(library)
    first, second = ranks_of(2)
    sent, received = Step(programs, 8, 8), Step(programs, 8, 8)
    seen: list[tuple[int, int, int, list[int]]] = []

    def receive() -> None:
        second.done()
        for _ in range(3):
            order = second.receive(received.address)
            tokens = (ctypes.c_int32 * received.c.num_tokens).from_address(received.c.token_ids or 0)
            seen.append((order.kind, order.begin, order.end, list(tokens)))
            second.done()

    thread = threading.Thread(target=receive)
    thread.start()
    first.wait_for_all()
    for count in (1, 3):
        sent.c.num_tokens = count
        sent.columns["token_ids"][:count] = range(10 * count, 11 * count)
        first.send_run(sent.address, 0, count, 0)
    first.send_idle_task()
    thread.join()
    assert seen == [
        (OrderKind.RUN, 0, 1, [10]),
        (OrderKind.RUN, 0, 3, [30, 31, 32]),
        (OrderKind.IDLE_TASK, 0, 0, []),
    ]
