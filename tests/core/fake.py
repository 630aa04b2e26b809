"""Fake executor that checks plans, and the `World` that builds an engine around it.

The fake executor keeps the same mirror as a real one. Instead of KV tensors it keeps a *shadow*. For every block and
offset, the shadow holds the group, position and prefix of the token written there. Of a recurrent state it holds the
number of tokens. Each step checks that a row sees exactly its own past. Wrong sharing, early reuse of a block, a
missing copy and reads of a freed block all fail.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from random import Random
from zlib import crc32

import msgspec

from quintet.core.engine import Engine
from quintet.core.hooks import FEATURES
from quintet.core.token_messages import StepMessages
from quintet.wire import codec
from quintet.wire.config import SchedulerConfig
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.errors import ErrorCode
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.messages import Admit, FinishReason
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import PoolingType, RowVector
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, NewRow, StepPlan, StepResult
from tests.core.fake_model import VOCAB, draw, make_model, vector_of
from tests.core.kv.fake_back_ends import FakeBackEnd, FakeDisk, FakePeers, FakeStore, Past, cache_config
from tests.wire.respec import changed

NS_PER_TOKEN = 1_000_000
"""Compute time that the executor reports."""


Content = dict[int, tuple[int, int, bytes]]
"""Content of a block by offset: group, position of the token, and a hash of all tokens up to it."""


@dataclass
class MirroredSlot:
    """Mirror of one slot."""

    row: NewRow
    tokens: list[int]
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks by group and position."""


class ExecutorFails(Exception):
    """Raised by a fault: the executor reports a failure in this step, or exits in it, with or without losing results."""

    def __init__(self, *, dies: bool, loses_results: bool = False) -> None:
        super().__init__("dies" if dies else "raises")
        self.dies = dies
        self.loses_results = loses_results


Fault = Callable[[list[tuple[NewRow, int, int]]], None]
"""Called with each step's rows (as admitted, start, count) before they are computed. May raise `ExecutorFails`."""


def no_fault(rows: list[tuple[NewRow, int, int]]) -> None:
    """Inject no fault: every step succeeds."""


class FakeExecutor:
    """Executes plans immediately and in order; results are read from a queue."""

    def __init__(
        self, capacity: Capacity, kv: KvSpec, fault: Fault = no_fault, pasts: Sequence[Past] = ()
    ) -> None:
        self.kv = kv
        self.pasts = pasts
        self.fault = fault
        self.capacity = capacity
        self.slot_states: dict[int, MirroredSlot] = {}
        self.shadow: dict[int, Content] = {}
        self.results: deque[StepResult] = deque()
        self.last_step: int | None = None
        self.users: dict[int, dict[int, int]] = {}
        """Block -> slot generation -> newest step that used the block."""
        self.num_copies = 0
        self.host: dict[int, Content] = {}
        """Shadow of host memory."""
        self.num_swapped_out = self.num_swapped_in = 0
        self.pooled_ends: dict[int, int] = {}
        """Slot generation -> tokens that were pooled, of a prompt that is pooled whole."""
        self.num_in_doubt: Counter[int] = Counter()
        """Drafts that were allowed since the slot's newest row with an exact start, at most."""

    def execute(self, plan: StepPlan) -> None:
        """Apply and check a plan, and queue its result."""
        plan = msgspec.msgpack.decode(codec.encode(plan), type=StepPlan)
        assert plan.tables_epoch == self.capacity.tables_epoch
        assert self.last_step is None or plan.step == self.last_step + 1
        self.last_step = plan.step
        for slot in codec.unpack_i32(plan.freed):
            del self.slot_states[slot]
        for row in plan.new_rows:
            assert row.slot not in self.slot_states and 0 <= row.slot < self.capacity.max_num_seqs
            self.slot_states[row.slot] = MirroredSlot(row, list(codec.unpack_i32(row.token_ids)))
        entries = iter(codec.unpack_i32(plan.blocks))
        for slot, group, position, block in zip(entries, entries, entries, entries, strict=True):
            assert 0 <= block < self.capacity.num_blocks
            assert 0 <= group < len(self.kv.groups)
            self.slot_states[slot].blocks[group, position] = block
        self._swap(plan)
        pairs = codec.unpack_i32(plan.copies)
        self.num_copies += len(pairs) // 2
        assert not {*pairs[::2]} & {*pairs[1::2]}, ("source of a copy is being written", pairs)
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            self.shadow[target] = dict(self.shadow[source])
        self._compute(plan)

    def _swap(self, plan: StepPlan) -> None:
        """Copy blocks to the host, then others from the host."""
        out, back = (list(codec.unpack_i32(column)) for column in (plan.swaps_out, plan.swaps_in))
        assert all(0 <= block < self.capacity.num_blocks for block in (out + back)[::2])
        assert all(0 <= block < self.capacity.num_host_blocks for block in out[1::2])
        num_blocks = self.capacity.num_host_blocks
        num_blocks += sum(tier.num_staging_blocks for tier in self.capacity.tiers)
        assert all(0 <= block < num_blocks for block in back[1::2])
        for column in (out[1::2], back[::2]):
            assert len(set(column)) == len(column), ("entry written twice", column)
        for device, host in zip(out[::2], out[1::2], strict=True):
            may_be_part = [group.kind for group in self.kv.groups] != ["full"]
            assert may_be_part or len(self.shadow[device]) == self.capacity.block_size, (
                "registered block is not full"
            )
            self.host[host] = dict(self.shadow[device])
        for device, host in zip(back[::2], back[1::2], strict=True):
            self.shadow[device] = dict(self.host[host])
        self.num_swapped_out += len(out) // 2
        self.num_swapped_in += len(back) // 2

    def _compute(self, plan: StepPlan) -> None:
        rows = list(
            zip(
                codec.unpack_i32(plan.slots),
                codec.unpack_i32(plan.starts),
                codec.unpack_i32(plan.counts),
                plan.samples,
                strict=True,
            )
        )
        assert plan.checksum in {0, self._checksum(rows)}
        assert not plan.drafts or len(plan.drafts) == len(rows)
        assert (rows or plan.blocks) and len({slot for slot, *_ in rows}) == len(rows)
        rows, drafts = self._resolve(plan, rows)
        self.fault([(self.slot_states[slot].row, start, count) for slot, start, count, _ in rows])
        written: set[tuple[int, int]] = set()
        for slot, start, _, _ in rows:
            self._check_states(self.slot_states[slot], start)
        for slot, start, count, _ in rows:
            slot_state = self.slot_states[slot]
            assert count >= 1
            self._write(slot_state, start, count, written, drafts[slot])
            self._check_past(slot_state, start, count, drafts[slot])
        pooled = {rows[each.row][0]: each for each in plan.pooled_rows}
        drawn, num_tokens_drawn, num_drafts = [], bytearray(), bytearray()
        for slot, start, count, samples in rows:
            slot_state = self.slot_states[slot]
            end = start + count
            self._check_past(slot_state, start, count, drafts[slot])  # a later row must not change its past
            for index, group in enumerate(self.kv.groups):
                for position in group.used(start, end, self.capacity.block_size):
                    block = slot_state.blocks[index, position]
                    self.users.setdefault(block, {})[slot_state.row.generation] = plan.step
            is_pooled = slot in pooled
            assert samples == (not is_pooled and end == len(slot_state.tokens) + len(drafts[slot]))
            if samples:
                accepted = self._verify(slot_state, drafts[slot])
                self._keep_states(slot_state, end - len(drafts[slot]) + len(accepted) - 2)
                drawn += accepted
                num_tokens_drawn.append(len(accepted))
                num_drafts.append(len(drafts[slot]))
        num_tokens = sum(count for _, _, count, _ in rows)
        self.results.append(
            StepResult(
                plan.step,
                0,
                codec.pack_i32(drawn),
                num_tokens=bytes(num_tokens_drawn) if plan.drafts else b"",
                num_drafts=bytes(num_drafts) if plan.drafts else b"",
                compute_ns=num_tokens * NS_PER_TOKEN,
                num_active_slots=len(self.slot_states),
                vectors=self._pool(plan, rows),
            )
        )

    def _pool(self, plan: StepPlan, rows: list[tuple[int, int, int, int]]) -> list[RowVector]:
        """Return a hash of each prompt that ends. Where all tokens are pooled, check that none is missing."""
        vectors = []
        for each in plan.pooled_rows:
            slot, start, count, samples = rows[each.row]
            slot_state = self.slot_states[slot]
            assert not samples and each.num_prompt_tokens == len(slot_state.tokens)
            if each.kind is PoolingType.MEAN:
                assert start == self.pooled_ends.get(slot_state.row.generation, 0)
                self.pooled_ends[slot_state.row.generation] = start + count
            if start + count == each.num_prompt_tokens:
                vectors.append(RowVector(each.row, vector_of(slot_state.tokens)))
        return vectors

    def _resolve(
        self, plan: StepPlan, rows: list[tuple[int, int, int, int]]
    ) -> tuple[list[tuple[int, int, int, int]], dict[int, list[int]]]:
        """Return the rows with the executor's own starts and with drafts, some wrong, and the drafts of each slot."""
        resolved, drafts = [], {}
        for index, (slot, start, count, samples) in enumerate(rows):
            drafts[slot] = chosen = list[int]()
            if not plan.drafts or not plan.drafts[index]:
                self.num_in_doubt[slot] = 0
                resolved.append((slot, start, count, samples))
                continue
            row, tokens = self.slot_states[slot].row, self.slot_states[slot].tokens
            assert count == 1 and samples and 0 <= len(tokens) - 1 - start <= self.num_in_doubt[slot]
            rng = Random(plan.step * 1000 + slot)
            for _ in range(rng.randint(0, plan.drafts[index] - 1)):
                draft = (draw(row.seed, tokens + chosen) + (rng.random() > 0.8)) % VOCAB
                if tokens[-1] in row.stop_ids or draft in row.stop_ids:
                    break
                chosen.append(draft)
            self.num_in_doubt[slot] += plan.drafts[index] - 1
            resolved.append((slot, len(tokens) - 1, 1 + len(chosen), samples))
        return resolved, drafts

    @staticmethod
    def _verify(slot_state: MirroredSlot, drafts: list[int]) -> list[int]:
        """Draw a token, and one more after each draft that equals the token before; append and return them."""
        drawn: list[int] = []
        while len(drawn) <= len(drafts) and drawn == drafts[: len(drawn)]:
            drawn.append(draw(slot_state.row.seed, slot_state.tokens + drawn))
        slot_state.tokens += drawn
        return drawn

    def _keep_states(self, slot_state: MirroredSlot, position: int) -> None:
        """Replace the states after rejected drafts by those after the token at ``position``."""
        link = self._chain(slot_state.tokens, position + 1)[-1]
        for index in (index for index, group in enumerate(self.kv.groups) if group.is_state):
            self.shadow[slot_state.blocks[index, 1]] = {0: (index, position, link)}

    def _write(
        self,
        slot_state: MirroredSlot,
        start: int,
        count: int,
        written: set[tuple[int, int]],
        drafts: list[int],
    ) -> None:
        """Write a row's keys and values in every group, and its states."""
        chain, size = self._chain(slot_state.tokens + drafts, start + count), self.capacity.block_size
        for index, group in enumerate(self.kv.groups):
            positions = [start + count - 1] if group.is_state else range(start, start + count)
            for position in positions:
                block = slot_state.blocks[index, 1 if group.is_state else position // size]
                offset = 0 if group.is_state else position % size
                assert (block, offset) not in written, ("two rows write one position", block, offset)
                written.add((block, offset))
                self._check_fence(block, slot_state.row.generation)
                content = self.shadow.setdefault(block, {})
                if offset == 0:
                    content.clear()
                content[offset] = (index, position, chain[position])
                for past in self.pasts:
                    past[chain[position]] = slot_state.tokens, position + 1

    def _check_states(self, slot_state: MirroredSlot, start: int) -> None:
        """Check that a row reads the states after its own past, before any row writes one."""
        for index, group in enumerate(self.kv.groups):
            if group.is_state and start:
                link = self._chain(slot_state.tokens, start)[-1]
                seen = self.shadow.get(slot_state.blocks[index, 0])
                assert seen == {0: (index, start - 1, link)}, (slot_state.row.request_id, start, seen)

    def _check_past(self, slot_state: MirroredSlot, start: int, count: int, drafts: list[int]) -> None:
        """Check that every visible position holds the row's own past."""
        chain, size = self._chain(slot_state.tokens + drafts, start + count), self.capacity.block_size
        for index, group in enumerate(self.kv.groups):
            for position in range(group.first_seen(start), 0 if group.is_state else start + count):
                seen = self.shadow[slot_state.blocks[index, position // size]].get(position % size)
                assert seen == (index, position, chain[position]), (
                    slot_state.row.request_id,
                    index,
                    position,
                )

    def _check_fence(self, block: int, writer: int) -> None:
        """Check that no other row used the block in an uncommitted step."""
        oldest = self.results[0].step if self.results else self.last_step
        assert oldest is not None
        for generation, step in self.users.get(block, {}).items():
            assert generation == writer or step < oldest, ("block reused before its fence", block, generation)

    def _checksum(self, rows: list[tuple[int, int, int, int]]) -> int:
        """Compute the checksum from the executor's mirror."""
        checksum = 0
        for slot, start, count, _ in rows:
            slot_state = self.slot_states[slot]
            checksum = crc32(codec.pack_i64((slot, slot_state.row.generation)), checksum)
            for index, group in enumerate(self.kv.groups):
                used = group.used(start, start + count, self.capacity.block_size)
                blocks = [slot_state.blocks[index, position] for position in used]
                checksum = crc32(codec.pack_i32(blocks), checksum)
        return checksum

    @staticmethod
    def _chain(tokens: list[int], num_tokens: int) -> list[bytes]:
        """Return, per position, a hash of all tokens up to it."""
        state = blake2b(digest_size=8)
        chain = []
        for token in tokens[:num_tokens]:
            state.update(token.to_bytes(4, "little"))
            chain.append(state.digest())
        assert len(chain) == num_tokens, "row computes tokens beyond its outputs"
        return chain


@dataclass
class Outcome:
    """Results that the world received for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    stop_id: int | None = None
    num_cached: int | None = None
    num_endings: int = 0
    vector: bytes = b""


class World:
    """An engine, its executor, and the detokenizers' messages."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        slots: int = 8,
        start: bool = True,
        **options: object,
    ) -> None:
        caching = options.pop("prefix_caching", True)
        self.num_host_blocks = int(options.pop("num_host_blocks", 0))  # type: ignore[call-overload]
        self.swap_bytes_per_s = int(options.pop("swap_bytes_per_s", 0))  # type: ignore[call-overload]
        max_model_len = options.pop("max_model_len", 256)
        features = options.pop("features", FEATURES)
        self.disk: FakeDisk | None = options.pop("disk", None)  # type: ignore[assignment]
        self.peers: FakePeers | None = options.pop("peers", None)  # type: ignore[assignment]
        self.store: FakeStore | None = options.pop("store", None)  # type: ignore[assignment]
        back_ends: tuple[FakeBackEnd | None, ...] = (self.disk, self.peers, self.store)
        self.tiers = [tier for tier in back_ends if tier is not None]
        self.fault: Fault = options.pop("fault", no_fault)  # type: ignore[assignment]
        self.failure: ExecutorFails | None = None
        """A failed step; the core receives it after all earlier results."""
        self.num_losses = 0
        groups = options.pop("groups", [KvGroup("full", [0])])
        self.kv = KvSpec(groups, 1, 64, block_size)  # type: ignore[arg-type]
        settings: dict[str, object] = {"max_num_seqs": slots, "max_num_batched_tokens": 64, "audit": True}
        new_engine = partial(
            Engine,
            make_model(max_model_len, self.kv),
            cache_config(
                self.tiers,
                enable_prefix_caching=bool(caching),
                swap_bytes=64 * self.num_host_blocks,
                events=options.pop("events", None),
            ),
            msgspec.convert(settings | options, SchedulerConfig),
            features,
            prompt_embeds=True,
        )
        self.engine = new_engine()
        self.now = 0
        self.epoch = 0
        self.block_size, self.num_blocks, self.slots, self.max_model_len = (
            block_size,
            num_blocks,
            slots,
            max_model_len,
        )
        self.plans: list[bytes] = []
        self.outcomes: dict[int, Outcome] = {}
        self.failed: dict[int, str] = {}
        self.codes: dict[int, ErrorCode] = {}
        self.unknown: list[int] = []
        """Choices answered with Unknown."""
        self.sent: dict[int, Admit] = {}
        """Newest attempt of every choice, as its frontend would resend it."""
        self._new_engine = new_engine
        if start:
            self.new_executor()

    def new_executor(self, num_blocks: int | None = None, block_size: int | None = None) -> None:
        """Replace the executor by an empty one."""
        self.epoch += 1
        self._begin_executor(
            Capacity(
                self.epoch,
                num_blocks or self.num_blocks,
                block_size or self.block_size,
                self.slots,
                self.max_model_len,
                num_host_blocks=self.num_host_blocks,
                swap_bytes_per_s=self.swap_bytes_per_s,
                tiers=[tier.capacity for tier in self.tiers],
            )
        )

    def _begin_executor(self, capacity: Capacity) -> None:
        self.failure = None
        kv = msgspec.structs.replace(self.kv, block_size=capacity.block_size)
        pasts = [tier.past for tier in (self.disk, self.store) if tier is not None]
        self.executor = FakeExecutor(capacity, kv, self.fault, pasts)
        for tier in self.tiers:
            tier.introduce(self.engine, capacity)
        self.apply(self.engine.capacity(capacity, self.tick()))

    def lose_executor(self) -> None:
        """Report the failed step to the core."""
        assert self.failure is not None
        self.num_losses += 1
        if self.failure.dies:
            self.new_executor()
            return
        last = self.executor.capacity
        self._begin_executor(
            msgspec.structs.replace(last, tables_epoch=last.tables_epoch + 1, failure="ValueError: poison")
        )

    def tick(self) -> int:
        """Return a distinct time for every event."""
        self.now += 1
        return self.now

    def admit(
        self, request_id: int, prompt: list[int], embeds: Sequence[EmbedsSpan] = (), **options: object
    ) -> None:
        """Send a request; options that are not of `RequestSpec` are sampling parameters."""
        fields = {name: options.pop(name) for name in tuple(options) if name in RequestSpec.__struct_fields__}
        params = SamplingParams(**({"seed": request_id, "max_tokens": 8} | options))
        if "output_ids" in fields:
            fields["output_ids"] = codec.pack_i32(fields["output_ids"])
        message = Admit(
            request_id,
            codec.pack_i32(prompt),
            RequestSpec(params, self.tick(), fields.pop("detokenizer", 0), **fields),
            self.now,
            embeds=list(embeds),
        )
        for choice in range(params.n):
            self.sent[request_id + choice] = changed(
                message,
                request_id=request_id + choice,
                params=msgspec.structs.replace(params, n=1),
                choice=message.spec.choice + choice,
            )
        self.apply(self.engine.admit(message, self.now))

    def resend(self, request_id: int, num_seen: int, **changes: object) -> None:
        """Resend the choice with the outputs that the frontend has seen, ``num_seen`` of them."""
        outcome = self.outcomes.setdefault(request_id, Outcome())
        outcome.tokens = outcome.tokens[:num_seen]
        outcome.finish, outcome.num_endings = FinishReason.NONE, 0
        last = self.sent[request_id]
        message = self.sent[request_id] = changed(
            last, output_ids=codec.pack_i32(outcome.tokens), attempt=last.spec.attempt + 1, **changes
        )
        self.apply(self.engine.admit(changed(message), self.tick()))

    def new_core(self) -> None:
        """Replace the core by an empty one; the executor restarts with it."""
        self.engine = self._new_engine()
        self.new_executor()

    def cancel(self, *request_ids: int) -> None:
        """Cancel requests."""
        self.apply(self.engine.cancel(request_ids, self.tick()))

    def plan(self) -> StepPlan | None:
        """Plan one step, if possible, and execute it."""
        self._order()
        plan = self.engine.plan(self.tick())
        if plan is not None:
            self.plans.append(codec.encode(plan))
            if self.failure is None:
                self._execute(plan)
        self._order()
        return plan

    def _order(self) -> None:
        for requests in self.engine.kv_requests(self.now):
            for tier in self.tiers if self.failure is None else ():
                if tier.tier == requests.tier:
                    tier.submit(requests, self.executor.capacity, self.executor.shadow, self.executor.host)

    def _execute(self, plan: StepPlan) -> None:
        try:
            self.executor.execute(plan)
        except ExecutorFails as failure:
            self.failure = failure
            if failure.loses_results:
                self.executor.results.clear()

    def commit(self) -> bool:
        """Commit the oldest result or its failure; return whether there was one."""
        if not self.executor.results:
            if self.failure is not None:
                self.lose_executor()
                return True
            return any(tier.answer(self.engine) for tier in self.tiers)
        result = self.executor.results.popleft()
        flights = self.engine.state.in_flight if self.engine.state is not None else ()
        if flights and flights[0].step == result.step:
            assert flights[0].num_active_slots == result.num_active_slots
        self.apply(self.engine.commit(result, self.tick()))
        return True

    def step(self) -> None:
        """Plan as far ahead as the depth allows, then commit one result."""
        while self.plan() is not None:
            pass
        self.commit()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until no request is active."""
        for _ in range(max_steps):
            if not self.engine.num_live:
                break
            before = self._account()
            self.step()
            assert before != self._account(), "requests did not end"
        assert not self.engine.num_live
        while self.commit():
            pass

    def _account(self) -> tuple[int, ...]:
        num_answers = sum(tier.num_answers for tier in self.tiers)
        return len(self.plans), len(self.executor.results), self.num_losses, num_answers

    def apply(self, effects: StepMessages) -> None:
        """Act as all detokenizers: keep the messages and check their order."""
        self.failed |= {failed.request_id: failed.message for failed in effects.failed}
        self.codes |= {failed.request_id: failed.code for failed in effects.failed}
        self.unknown += effects.unknown
        for pooled in effects.pooled:
            outcome = self.outcomes.setdefault(pooled.request_id, Outcome())
            assert outcome.num_endings == 0 and not outcome.tokens
            outcome.vector, outcome.num_cached = pooled.vector, pooled.num_cached_tokens
            outcome.finish, outcome.num_endings = FinishReason.STOP, 1
        for _, tokens in effects.tokens:
            for opened in tokens.opens:
                outcome = self.outcomes.setdefault(opened.request_id, Outcome())
                known = list(codec.unpack_i32(opened.output_ids))
                assert not outcome.tokens or known[: opened.num_seen] == outcome.tokens[: opened.num_seen]
                outcome.tokens = known
                outcome.num_cached = opened.num_cached_tokens
            values = iter(codec.unpack_i32(tokens.token_ids))
            columns = zip(
                codec.unpack_i64(tokens.request_ids),
                codec.unpack_i32(tokens.first_indexes),
                tokens.num_tokens,
                tokens.finishes,
                strict=True,
            )
            named_stops = set(codec.unpack_i32(tokens.named_stops))
            for row, (request_id, first, count, finish) in enumerate(columns):
                outcome = self.outcomes[request_id]
                assert outcome.num_endings == 0 and first == len(outcome.tokens)
                outcome.tokens += [next(values) for _ in range(count)]
                if finish:
                    outcome.finish = FinishReason(finish)
                    outcome.stop_id = outcome.tokens[-1] if row in named_stops else None
                    outcome.num_endings += 1
            assert next(values, None) is None

    def assert_idle(self) -> None:
        """Check that every block and slot is free or cached."""
        state = self.engine.state
        assert state is not None and not state.live and not state.in_flight and not state.pool.fenced
        assert state.pool.num_available == state.limits.num_blocks
        assert len(state.free_slots) == state.limits.num_slots
        for tier in state.pool.tiers.all:
            host = tier.fetches.host_blocks
            assert not host.wanted and len(host.free) + len(host.leaving) == host.num_blocks
