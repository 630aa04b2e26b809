"""Plans on the device against the host's tables and batches, over traces of steps as the core creates them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.tables import (
    ONE_BLOCK_TOKENS,
    PackedPlan,
    PlanRangeError,
    StagingLayout,
    apply_plan,
    pack_staging,
    scatter_tokens,
)
from quintet.executor.backends.cuda.tables import DeviceTables, SampledRows, StepMemory, StepRows
from quintet.executor.batch import BatchBuilder
from quintet.executor.models.layers.attention import AttentionWindow, Heads
from quintet.executor.sampling.settings import settings_of, settings_table
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.codec import pack_i32
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

NUM_SLOTS, MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 12, 1500, 16, 2000
KV = KvSpec([KvGroup("full", [0]), KvGroup("sliding", [1], 64)], 1, 1024, BLOCK_SIZE)


def plan_of(
    rows: list[tuple[int, int, int]],
    new_rows: list[NewRow] | None = None,
    blocks: list[int] | None = None,
    samples: list[int] | None = None,
    copies: list[int] | None = None,
    swaps: tuple[list[int], list[int]] = ([], []),
) -> StepPlan:
    """rows: slot, start, count of each; every row draws unless ``samples`` says otherwise."""
    slots, starts, counts = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return StepPlan(
        step=1,
        sent_ns=0,
        freed=b"",
        new_rows=new_rows or [],
        blocks=pack_i32(blocks or []),
        copies=pack_i32(copies or []),
        slots=pack_i32(slots),
        starts=pack_i32(starts),
        counts=pack_i32(counts),
        samples=bytes(samples or [1] * len(rows)),
        swaps_out=pack_i32(swaps[0]),
        swaps_in=pack_i32(swaps[1]),
    )


def new_row(slot: int, tokens: list[int], num_prompt: int, seed: int = 7) -> NewRow:
    params = SamplingParams(temperature=0.5 + slot, top_k=slot, min_p=0.1, seed=seed)
    return NewRow(slot, 1, slot, pack_i32(tokens), num_prompt, params, seed)


@dataclass
class HostAndDevice:
    """The host's tables and the device's, with the same plans applied."""

    device: Device
    host: SlotTables = field(init=False)
    tables: DeviceTables = field(init=False)
    memory: StepMemory = field(init=False)
    builder: BatchBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.host = SlotTables(NUM_SLOTS, MAX_LEN, KV, torch.device("cpu"))
        self.tables = DeviceTables.reserve(NUM_SLOTS, MAX_LEN, KV, self.device.torch_device)
        self.memory = StepMemory(self.tables, 2 * ONE_BLOCK_TOKENS)
        self.builder = BatchBuilder(
            BLOCK_SIZE, [(0, AttentionWindow(), Heads(1, 1, 4, 4))], True, torch.float32
        )

    def run(
        self, plan: StepPlan, padded_rows: int | None = None, padded_tokens: int | None = None
    ) -> tuple[PackedPlan, StepRows, SampledRows]:
        """Apply the plan on both sides and compare everything."""
        layout = StagingLayout.of(self.tables, NUM_BLOCKS)
        words = np.full(layout.num_words(plan), -7, np.int32)
        packed = pack_staging(plan, layout, words)
        staging = torch.from_numpy(words[: packed.num_words].copy()).to(self.device.torch_device)
        padded_rows = packed.num_rows if padded_rows is None else padded_rows
        padded_tokens = packed.num_tokens if padded_tokens is None else padded_tokens
        rows = self.memory.rows(padded_rows, padded_tokens, packed.max_count)
        sampled = self.memory.sampled(padded_rows)
        apply_plan(self.device, staging, self.tables, rows, sampled)
        self.host.apply(plan)
        assert self.tables.token_ids.cpu().equal(self.host.token_ids)
        assert np.array_equal(self.tables.block_table.cpu().numpy(), self.host.block_table)
        self.compare(Rows(plan), packed, rows, sampled)
        return packed, rows, sampled

    def compare(self, expected: Rows, packed: PackedPlan, rows: StepRows, sampled: SampledRows) -> None:
        num_rows, num_tokens, num_sampled = (
            len(expected.slots),
            int(expected.counts.sum()),
            len(expected.sampling),
        )
        assert (packed.num_rows, packed.num_tokens, packed.num_sampled) == (num_rows, num_tokens, num_sampled)

        def check(actual: torch.Tensor | None, right: object, padding: int, size: int) -> None:
            assert actual is not None
            values = actual.tolist()
            assert values[:size] == torch.as_tensor(right).reshape(-1).tolist()
            assert values[size:] == [padding] * (len(values) - size)

        check(rows.slots, expected.slots, -1, num_rows)
        check(rows.starts, expected.starts, 0, num_rows)
        check(rows.counts, expected.counts, 0, num_rows)
        check(rows.offsets, np.append(expected.offsets, num_tokens), num_tokens, num_rows + 1)
        check(rows.token_rows, np.repeat(np.arange(num_rows), expected.counts), -1, num_tokens)
        which = expected.sampling
        check(sampled.slots, expected.slots[which], -1, num_sampled)
        check(sampled.positions, (expected.starts + expected.counts)[which], 0, num_sampled)
        check(sampled.tokens, (expected.offsets + expected.counts - 1)[which], 0, num_sampled)
        if not num_rows:
            return
        batch = self.builder.build(expected, self.host)
        check(rows.token_ids, batch.token_ids, 0, num_tokens)
        check(rows.positions, batch.positions, -1, num_tokens)
        check(rows.prompts, batch.prompts, 0, num_tokens)
        assert rows.kv_rows is not None
        for kv_rows, blocks in zip(rows.kv_rows, batch.blocks, strict=True):
            check(kv_rows, blocks * BLOCK_SIZE + batch.offsets, -1, num_tokens)


def blocks_for(slot: int, num_tokens: int) -> list[int]:
    """Block-table entries that cover this number of tokens of a slot."""
    return [
        value
        for at in range(-(-num_tokens // BLOCK_SIZE))
        for value in (slot, 0, at, (slot * 131 + at * 17) % NUM_BLOCKS)
    ]


def test_request_from_prompt_to_decode_among_others(device: Device) -> None:
    world = HostAndDevice(device)
    prompts = {3: 40, 7: 17, 0: 1}
    plan = plan_of(
        rows=[(3, 0, 30), (7, 0, 17), (0, 0, 1)],
        new_rows=[new_row(slot, list(range(100 * slot, 100 * slot + n)), n) for slot, n in prompts.items()],
        blocks=[value for slot, n in prompts.items() for value in blocks_for(slot, n + 1)],
        samples=[0, 1, 1],
    )
    world.run(plan)
    world.run(plan_of(rows=[(3, 30, 10), (7, 17, 1), (0, 1, 1)]), padded_rows=5, padded_tokens=20)
    world.run(plan_of(rows=[(7, 18, 1), (0, 2, 1), (3, 40, 1)], blocks=[3, 0, 2, 999]), 8, 8)


def test_sampling_settings_reach_the_record_of_the_slot(device: Device) -> None:
    world = HostAndDevice(device)
    rows = [new_row(slot, [1, 2, 3], 2, seed) for slot, seed in ((5, 2**64 - 1), (2, 9), (5, 4))]
    world.run(plan_of([(2, 0, 3), (5, 0, 3)], rows))
    expected = settings_table(NUM_SLOTS)
    for row in rows:
        expected[row.slot] = settings_of(row.params, row.seed)
    assert world.tables.settings.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_tokens", [ONE_BLOCK_TOKENS, ONE_BLOCK_TOKENS + 1])
def test_long_prompt(device: Device, num_tokens: int) -> None:
    """At and past the size that needs two launches."""
    world = HostAndDevice(device)
    plan = plan_of(
        rows=[(4, 0, num_tokens - 5), (9, 0, 5)],
        new_rows=[new_row(4, list(range(num_tokens)), num_tokens), new_row(9, [6] * 5, 5)],
        blocks=blocks_for(4, num_tokens) + blocks_for(9, 5),
    )
    world.run(plan, padded_rows=6, padded_tokens=num_tokens + 3)


def test_last_entry_of_a_position_wins(device: Device) -> None:
    world = HostAndDevice(device)
    entries = [1, 0, 0, 11, 2, 0, 0, 20, 1, 0, 0, 12, 1, 0, 1, 13, 2, 0, 0, 21, 1, 0, 0, 14]
    world.run(plan_of([(1, 0, 1), (2, 0, 1)], blocks=entries))
    assert world.tables.block_table[0, 1, :2].tolist() == [14, 13]
    assert world.tables.block_table[0, 2, 0].item() == 21


def test_drawn_tokens_are_available_to_the_next_plan(device: Device) -> None:
    world = HostAndDevice(device)
    _, _, sampled = world.run(
        plan_of(
            [(8, 0, 2), (1, 0, 3), (6, 0, 1)], [new_row(8, [4, 5], 2), new_row(6, [9], 1)], samples=[1, 0, 1]
        ),
        padded_rows=5,
    )
    drawn = torch.tensor([70, 71, 72, 73, 74], dtype=torch.int32, device=device.torch_device)
    scatter_tokens(device, drawn, sampled, world.tables)
    world.host.token_ids[8, 2], world.host.token_ids[6, 1] = 70, 71
    _, rows, _ = world.run(plan_of([(6, 1, 1), (8, 2, 1)]), padded_rows=4, padded_tokens=4)
    assert rows.token_ids.tolist() == [71, 70, 0, 0]


def test_swaps_and_copies_are_packed() -> None:
    """As pairs of source and destination; the message names the device block first for either direction."""
    plan = plan_of(
        [(0, 0, 1)], [new_row(0, [1, 2], 2)], copies=[5, 6, 7, 8], swaps=([100, 1, 101, 2], [200, 3])
    )
    layout = StagingLayout(NUM_SLOTS, MAX_LEN + 1, 94, NUM_BLOCKS, num_host_blocks=4)
    words = np.zeros(layout.num_words(plan), np.int32)
    packed = pack_staging(plan, layout, words)
    assert words[packed.swaps_out].tolist() == [100, 1, 101, 2]
    assert words[packed.swaps_in].tolist() == [3, 200]
    assert words[packed.copies].tolist() == [5, 6, 7, 8]
    assert packed.copies.stop == packed.num_words


def test_plan_without_rows_updates_tables(device: Device) -> None:
    """A plan without rows still updates the tables; every row is padding."""
    world = HostAndDevice(device)
    world.run(plan_of([], blocks=[2, 0, 3, 4]), padded_rows=2, padded_tokens=2)


def test_random_traces(device: Device) -> None:
    random = np.random.default_rng(0)
    world = HostAndDevice(device)
    for _ in range(12):
        slots = random.permutation(NUM_SLOTS)[: random.integers(1, NUM_SLOTS + 1)].tolist()
        starts = random.integers(0, 200, len(slots)).tolist()
        counts = (random.integers(1, 40, len(slots)) ** random.integers(0, 2, len(slots))).tolist()
        entering = [slot for slot in slots if random.random() < 0.3]
        plan = plan_of(
            rows=list(zip(slots, starts, counts, strict=True)),
            new_rows=[
                new_row(slot, random.integers(0, 1000, 240).tolist(), int(random.integers(1, 240)))
                for slot in entering
            ],
            blocks=[
                int(value)
                for slot in slots
                for at in range(15)
                for value in (slot, random.integers(2), at, random.integers(NUM_BLOCKS))
            ],
            samples=random.integers(0, 2, len(slots)).tolist(),
        )
        world.run(plan, NUM_SLOTS, int(sum(counts)) + int(random.integers(0, 9)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of([(NUM_SLOTS, 0, 1)]), "slot: the plan has 12 to 12; must be at least 0 and below 12"),
        (plan_of([(0, MAX_LEN, 1)]), "last position: the plan has 1501"),
        (plan_of([(0, 0, 1)], blocks=[-1, 0, 0, 0]), "slot of a block: the plan has -1"),
        (
            plan_of([(0, 0, 1)], blocks=[0, 2, 0, 0]),
            "group of a block: the plan has 2 to 2; must be at least 0 and below 2",
        ),
        (plan_of([(0, 0, 1)], blocks=[0, 0, 94, 0]), "index in a block table"),
        (plan_of([(0, 0, 1)], blocks=[0, 0, 0, NUM_BLOCKS]), "block: the plan has 2000"),
        (plan_of([(0, 0, 1)], copies=[0, NUM_BLOCKS]), "block to copy"),
        (plan_of([(0, 0, 1)], swaps=([NUM_BLOCKS, 0], [])), "block to swap: the plan has 2000"),
        (
            plan_of([(0, 0, 1)], swaps=([], [0, 4])),
            "host block: the plan has 4 to 4; must be at least 0 and below 0",
        ),
        (plan_of([(0, 0, 1)], [new_row(NUM_SLOTS, [1], 1)]), "slot of a new row"),
        (plan_of([(0, 0, 1)], [new_row(0, [1] * (MAX_LEN + 2), 1)]), "length of a new row"),
    ],
)
def test_plan_outside_the_tables_is_rejected(plan: StepPlan, message: str) -> None:
    layout = StagingLayout(NUM_SLOTS, MAX_LEN + 1, 94, NUM_BLOCKS, num_groups=2)
    with pytest.raises(PlanRangeError, match=message):
        pack_staging(plan, layout, np.zeros(layout.num_words(plan), np.int32))


def test_too_small_buffer_is_rejected() -> None:
    plan, layout = plan_of([(0, 0, 1)]), StagingLayout(NUM_SLOTS, MAX_LEN + 1, 94, NUM_BLOCKS)
    with pytest.raises(ValueError, match="the buffer has 20"):
        pack_staging(plan, layout, np.zeros(20, np.int32))


def test_more_rows_than_the_memory_holds(device: Device) -> None:
    with pytest.raises(ValueError, match="a step has 13 rows and 13 tokens"):
        HostAndDevice(device).memory.rows(13, 13, 1)
