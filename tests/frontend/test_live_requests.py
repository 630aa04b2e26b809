"""Live requests without HTTP or processes: routing, deltas, endings, cancels, lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from quintet.frontend.live_requests import LiveRequests
from quintet.frontend.streams import Batch, Stream
from quintet.wire import codec
from quintet.wire.codec import pack_i32, pack_i64, unpack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import (
    Alternative,
    Cancel,
    Failed,
    Finish,
    FinishReason,
    PositionLogprobs,
    RowLogprobs,
    Started,
    Submit,
    Text,
    TextPrompt,
    Unknown,
)
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import ProcessSlot, SlotState, Topology
from tests.frontend.configs import make_config
from tests.wire.respec import changed

PROMPT = TextPrompt("hello")


@dataclass
class World:
    """The live requests, their sent messages, and the live workers."""

    run_dir: str = "/nowhere"
    sent: list[tuple[Role, int, msgspec.Struct]] = field(default_factory=list)
    unreachable: bool = False
    version: int = 0

    def __post_init__(self) -> None:
        self.requests = LiveRequests(WorkerId(Role.FRONTEND, 0, 1), self.send, make_config(self.run_dir))
        self.slots = {(role, 0): (1, SlotState.READY) for role in Role if role is not Role.SUPERVISOR}

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        if self.unreachable:
            return False
        self.sent.append((role, index, changed(message) if isinstance(message, Submit) else message))
        return True

    def follow(self) -> World:
        """Publish the current slots."""
        self.version += 1
        slots = [
            ProcessSlot(WorkerId(role, index, epoch), "", 1, state)
            for (role, index), (epoch, state) in self.slots.items()
        ]
        self.requests.follow(Topology(self.version, slots))
        return self

    def of(self, kind: type[msgspec.Struct]) -> list[Any]:
        return [message for _, _, message in self.sent if isinstance(message, kind)]

    def targets(self, kind: type[msgspec.Struct]) -> list[int]:
        return [index for _, index, message in self.sent if isinstance(message, kind)]

    def text(
        self,
        rows: list[tuple[int, str, int, int, list[int]]],
        started: list[int] = [],  # noqa: B006 - never changed
        finished: list[tuple[int, FinishReason]] = [],  # noqa: B006 - never changed
        logprobs: list[RowLogprobs] = [],  # noqa: B006 - never changed
        sender: tuple[int, int] = (0, 9),
    ) -> None:
        """Deliver one `Text`; a row is ``(id, delta, offset, first index, token ids)``."""
        self.requests.apply_text(
            Text(
                step=1,
                sent_ns=0,
                tokens_sent_ns=0,
                started=[Started(i, 3, 0, 0, 0) for i in started],
                request_ids=[row[0] for row in rows],
                deltas=[row[1] for row in rows],
                offsets=[row[2] for row in rows],
                first_indexes=[row[3] for row in rows],
                num_tokens=[len(row[4]) for row in rows],
                token_ids=pack_i32([token for row in rows for token in row[4]]),
                finishes=[Finish(i, reason, None, 1) for i, reason in finished],
                logprobs=logprobs,
                sender=sender,
            )
        )


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def spec_of(**fields: Any) -> RequestSpec:
    """Return a specification with these sampling parameters and other fields."""
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    return RequestSpec(SamplingParams(max_tokens=8, **params), **fields)


async def rest(stream: Stream) -> list[Batch]:
    return [batch async for batch in stream]


def test_a_request_from_submit_to_end() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(priority=2, cache_salt="s"))
        (submit,) = world.of(Submit)
        spec = submit.spec
        assert (spec.priority, spec.cache_salt, submit.core, spec.detokenizer) == (2, "s", 0, 0)
        assert spec.params.seed is not None
        rid = submit.request_id
        world.text([(rid, "he", 0, 0, [1])], started=[rid])
        first = await stream.next_batch()
        assert first is not None
        assert first.started is not None
        assert [(d.text, list(d.token_ids)) for d in first.deltas] == [("he", [1])]
        world.text([(rid, "llo", 2, 1, [2, 3])], finished=[(rid, FinishReason.LENGTH)])
        (last,) = await rest(stream)
        assert (last.deltas[0].text, list(last.deltas[0].token_ids)) == ("llo", [2, 3])
        assert last.deltas[0].finish is not None
        assert list(stream.choices[0].output_ids) == [1, 2, 3]
        assert world.requests.num_live == 0
        assert await stream.next_batch() is None

    run(scenario())


def test_a_slow_reader_gets_one_batch_for_many_steps() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=2))
        a, b = stream.request_id, stream.request_id + 1
        for i in range(100):
            world.text([(a, "x", i, i, [i]), (b, "yy", 2 * i, i, [i])], started=[a, b] if i == 0 else [])
        world.text([], finished=[(b, FinishReason.STOP), (a, FinishReason.LENGTH)])
        (batch,) = await rest(stream)
        assert {d.choice: d.text for d in batch.deltas} == {0: "x" * 100, 1: "y" * 200}
        assert all(list(d.token_ids) == list(range(100)) for d in batch.deltas)

    run(scenario())


def test_final_only_wakes_once() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(), interval=None)
        reader = asyncio.ensure_future(rest(stream))
        for i in range(3):
            world.text([(stream.request_id, "x", i, i, [i])])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not reader.done()
            assert not stream.is_posted
        world.text([], finished=[(stream.request_id, FinishReason.STOP)])
        assert [batch.deltas[0].text for batch in await reader] == ["xxx"]

    run(scenario())


def test_repeated_tokens_are_dropped() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(logprobs=0))
        rid = stream.request_id

        def at(token: int) -> PositionLogprobs:
            return PositionLogprobs(Alternative(token, 0.0, "", b"", 1), [], 0)

        world.text([(rid, "abc", 0, 0, [1, 2])], logprobs=[RowLogprobs(0, [at(1), at(2)])])
        world.text([(rid, "abc", 0, 0, [1, 2])], logprobs=[RowLogprobs(0, [at(1), at(2)])])
        world.text([(rid, "bcde", 1, 1, [2, 3])], logprobs=[RowLogprobs(0, [at(2), at(3)])])
        world.text([], finished=[(rid, FinishReason.STOP)])
        world.text([(rid, "f", 5, 3, [4])], finished=[(rid, FinishReason.STOP)])
        (batch,) = await rest(stream)
        (delta,) = batch.deltas
        assert (delta.text, list(delta.token_ids)) == ("abcde", [1, 2, 3])
        assert [position.chosen.token_id for position in delta.logprobs] == [1, 2, 3]
        assert world.requests.metrics.duplicate_endings.value == 1
        assert world.requests.metrics.stale_deltas.value == 2

    run(scenario())


def test_held_back_text_may_arrive_without_a_token() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        rid = stream.request_id
        world.text([(rid, "", 0, 0, [1])])
        world.text([(rid, "ab", 0, 1, [])], finished=[(rid, FinishReason.STOP)])
        (batch,) = await rest(stream)
        assert (batch.deltas[0].text, list(batch.deltas[0].token_ids)) == ("ab", [1])

    run(scenario())


@pytest.mark.parametrize("row", [("x", 5, 0), ("x", 0, 5)])
def test_missing_output_is_an_error_not_a_gap(row: tuple[str, int, int]) -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        world.text([(stream.request_id, *row, [1])])
        with pytest.raises(RequestError, match="was lost"):
            await stream.next_batch()
        assert world.requests.num_live == 0

    run(scenario())


def test_a_failure_ends_every_choice_once() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=3))
        world.text([(stream.request_id, "a", 0, 0, [1])])
        failed = Failed(stream.request_id, ErrorCode.TOO_LONG, "too long", "prompt")
        world.requests.apply_failed(failed)
        world.requests.apply_failed(failed)
        batch = await stream.next_batch()
        assert batch is not None
        assert batch.deltas[0].text == "a"
        with pytest.raises(RequestError, match="too long") as caught:
            await stream.next_batch()
        assert caught.value.param == "prompt"
        assert world.requests.num_live == 0
        assert world.requests.metrics.duplicate_endings.value == 1
        assert await stream.next_batch() is None

    run(scenario())


def test_cancel_waits_for_the_engines_answer() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=2))
        a, b = stream.request_id, stream.request_id + 1
        world.text([(a, "x", 0, 0, [1])], finished=[(a, FinishReason.STOP)])
        stream.cancel()
        stream.cancel()
        assert [cancel.request_ids for cancel in world.of(Cancel)] == [[b]]
        assert world.requests.num_live == 1
        world.text([], finished=[(b, FinishReason.ABORT)])
        (batch,) = await rest(stream)
        reasons = {d.choice: d.finish.reason for d in batch.deltas if d.finish is not None}
        assert reasons == {0: FinishReason.STOP, 1: FinishReason.ABORT}
        assert world.requests.num_live == 0
        stream.cancel()
        assert len(world.of(Cancel)) == 1

    run(scenario())


@pytest.mark.parametrize("answer", ["failed", "unknown"])
def test_cancelled_request_ends_as_aborted_for_any_answer(answer: str) -> None:
    """The tokenizer still had it, or rejected it at that moment; or no process knew it."""

    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=2))
        first = stream.request_id
        stream.cancel()
        if answer == "failed":
            world.requests.apply_failed(Failed(first, ErrorCode.TOO_LONG, "too long", "prompt"))
        else:
            world.requests.resume_unknown(Unknown(pack_i64([first, first + 1])))
        (batch,) = await rest(stream)
        assert [d.finish.reason for d in batch.deltas if d.finish is not None] == [FinishReason.ABORT] * 2
        assert world.requests.num_live == 0
        assert len(world.of(Submit)) == len(world.of(Cancel)) == 1

    run(scenario())


def test_closed_stream_buffers_nothing() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        rid = stream.request_id
        stream.close()
        assert len(world.of(Cancel)) == 1
        world.text([(rid, "x", 0, 0, [1])])
        assert stream.choices[0].texts == []
        world.text([], finished=[(rid, FinishReason.ABORT)])
        assert world.requests.num_live == 0

    run(scenario())


def test_requests_wait_for_workers_that_are_not_ready() -> None:
    async def scenario() -> None:
        world = World()
        first_cancelled = world.requests.submit(PROMPT, spec_of())
        cancelled = world.requests.submit(PROMPT, spec_of())
        assert world.sent == []
        cancelled.cancel()
        assert cancelled.ended
        for role in (Role.TOKENIZER, Role.DETOKENIZER, Role.CORE):
            world.slots[role, 0] = (1, SlotState.STARTING)
            world.follow()
            assert world.sent == []
            world.slots[role, 0] = (1, SlotState.READY)
        world.follow()
        assert [submit.request_id for submit in world.of(Submit)] == [first_cancelled.request_id]
        assert world.of(Cancel) == []

    run(scenario())


def test_requests_go_to_the_least_loaded_worker() -> None:
    async def scenario() -> None:
        world = World()
        for index in (1, 2):
            world.slots[Role.TOKENIZER, index] = (1, SlotState.READY)
            world.slots[Role.DETOKENIZER, index] = (1, SlotState.READY)
        world.slots[Role.TOKENIZER, 1] = (1, SlotState.STALLED)
        world.follow()
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(6)]
        assert sorted(world.targets(Submit)) == [0, 0, 0, 2, 2, 2]
        assert sorted(submit.spec.detokenizer for submit in world.of(Submit)) == [0, 0, 1, 1, 2, 2]
        for stream in streams[:3]:
            rid = stream.request_id
            world.text([], started=[rid], finished=[(rid, FinishReason.STOP)])
        for stream in streams[3:]:
            world.text([], finished=[(stream.request_id, FinishReason.STOP)])
        for role in (Role.TOKENIZER, Role.DETOKENIZER, Role.CORE):
            assert [world.requests.ledger.at(role, index) for index in range(3)] == [0, 0, 0]

    run(scenario())


@pytest.mark.parametrize("state", [SlotState.READY, SlotState.STARTING])
def test_request_to_lost_tokenizer_is_resent(state: SlotState) -> None:
    async def scenario() -> None:
        world = World().follow()
        waiting = world.requests.submit(PROMPT, spec_of(seed=5))
        started = world.requests.submit(PROMPT, spec_of())
        world.text([], started=[started.request_id])
        world.slots[Role.TOKENIZER, 0] = (2, state)
        world.follow()
        if state is SlotState.STARTING:
            assert len(world.of(Submit)) == 2
            world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)
            world.follow()
        first, _, again = world.of(Submit)
        assert again.request_id == waiting.request_id
        assert changed(again, sent_ns=first.sent_ns, topology=first.spec.topology) == first
        assert world.requests.num_live == 2
        assert world.requests.ledger.at(Role.TOKENIZER, 0) == 1
        for stream in (waiting, started):
            world.text([], finished=[(stream.request_id, FinishReason.STOP)])
        assert world.requests.num_live == 0
        for role in (Role.TOKENIZER, Role.DETOKENIZER, Role.CORE):
            assert world.requests.ledger.at(role, 0) == 0

    run(scenario())


def test_cancel_with_lost_tokenizer_ends_the_request() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        stream.cancel()
        world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        assert len(world.of(Submit)) == 1
        assert len(world.of(Cancel)) == 2
        (batch,) = await rest(stream)
        assert batch.deltas[0].finish is not None
        assert batch.deltas[0].finish.reason is FinishReason.ABORT
        assert world.requests.num_live == 0

    run(scenario())


@pytest.mark.parametrize("role", [Role.CORE, Role.DETOKENIZER])
@pytest.mark.parametrize("down", [True, False])
def test_requests_of_lost_core_or_detokenizer_are_resent(role: Role, down: bool) -> None:
    async def scenario() -> None:
        world = World()
        world.slots[role, 1] = (1, SlotState.READY)
        world.follow()
        fresh, running, other = (world.requests.submit(PROMPT, spec_of(n=2)) for _ in range(3))
        index = 0 if role is Role.CORE else fresh.submit.spec.detokenizer
        held = [
            s
            for s in (fresh, running, other)
            if (s.submit.core, s.submit.spec.detokenizer)[role is not Role.CORE] == index
        ]
        running = held[-1]
        rid = running.request_id
        world.text([(rid, "ab", 0, 0, [1, 2])], started=[rid])
        world.slots[role, index] = (1, SlotState.DOWN) if down else (2, SlotState.STARTING)
        world.sent.clear()
        world.follow()
        again = world.of(Submit)
        ids = {submit.request_id for submit in again}
        assert ids == {s.request_id for s in held} | {rid, rid + 1}
        for submit in again:
            assert submit.spec.attempt == 1
            assert (submit.core if role is Role.CORE else submit.spec.detokenizer) == 1 - index
            whole = submit.request_id not in (rid, rid + 1)
            assert submit.spec.params.n == (2 if whole else 1)
            assert submit.spec.output_ids == (pack_i32([1, 2]) if submit.request_id == rid else b"")
            assert submit.spec.choice == submit.request_id - (submit.request_id if whole else rid)
        world.text([(rid, "bc", 1, 1, [2, 3])])  # replayed from its second token
        world.text([], finished=[(rid, FinishReason.STOP), (rid + 1, FinishReason.STOP)])
        batches = await rest(running)
        assert "".join(d.text for b in batches for d in b.deltas if d.choice == 0) == "abc"
        assert running.error is None

    run(scenario())


@pytest.mark.parametrize("has_text", [False, True])
def test_resumed_outputs_are_sent_until_acknowledged(has_text: bool) -> None:
    async def scenario() -> None:
        world = World().follow()
        rid = world.requests.submit(PROMPT, spec_of(output_ids=pack_i32([1, 2]), replays=True)).request_id
        if has_text:
            world.text([(rid, "abc", 0, 0, [1, 2, 3])], started=[rid])
        world.slots[Role.DETOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        first, second = (submit.spec for submit in world.of(Submit))
        assert (first.output_ids, first.num_seen) == (pack_i32([1, 2]), 0)
        wanted = ([1, 2, 3], 3) if has_text else ([1, 2], 0)
        assert (list(unpack_i32(second.output_ids)), second.num_seen) == wanted

    run(scenario())


def test_text_of_a_lost_detokenizer_is_dropped() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        rid = stream.request_id
        world.slots[Role.DETOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        world.text([(rid, "x", 0, 0, [1])], sender=(0, 1))
        assert stream.num_output_tokens == 0
        world.text([(rid, "x", 0, 0, [1])], sender=(0, 2))
        assert stream.num_output_tokens == 1

    run(scenario())


def test_requests_leave_a_retiring_detokenizer() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        world.slots[Role.DETOKENIZER, 0] = (1, SlotState.RETIRING)
        world.follow()
        assert len(world.of(Submit)) == 1  # there is no other detokenizer
        world.slots[Role.DETOKENIZER, 1] = (1, SlotState.READY)
        world.follow()
        world.follow()
        first, second = world.of(Submit)
        assert (first.spec.detokenizer, second.spec.detokenizer, second.spec.attempt) == (0, 1, 1)
        assert second.request_id == stream.request_id

    run(scenario())


@pytest.mark.parametrize("role", [Role.CORE, Role.DETOKENIZER])
def test_cancelled_request_ends_without_live_workers(role: Role) -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        world.text([(stream.request_id, "a", 0, 0, [1])], started=[stream.request_id])
        stream.cancel()
        world.slots[role, 0] = (2, SlotState.STARTING)
        world.follow()
        assert stream.ended and world.requests.num_live == 0
        assert len(world.of(Submit)) == 1

    run(scenario())


def test_old_topology_is_ignored() -> None:
    async def scenario() -> None:
        world = World().follow()
        world.requests.submit(PROMPT, spec_of())
        world.requests.follow(Topology(0, []))
        assert world.requests.num_live == 1
        assert world.requests.workers.missing() == []

    run(scenario())


def test_invalid_parameters_are_rejected_before_sending() -> None:
    world = World().follow()
    with pytest.raises(RequestError, match="temperature is 9"):
        world.requests.checked(SamplingParams(temperature=9.0))
    assert world.sent == []
    assert world.requests.num_live == 0


def test_request_waits_for_an_unconnected_peer() -> None:
    async def scenario() -> None:
        world = World().follow()
        world.unreachable = True
        stream = world.requests.submit(PROMPT, spec_of())
        assert stream.tokenizer is None
        world.unreachable = False
        world.follow()
        assert len(world.of(Submit)) == 1

    run(scenario())


def test_fail_all_ends_all_requests() -> None:
    async def scenario() -> None:
        world = World().follow()
        streams = [world.requests.submit(PROMPT, spec_of(n=2)) for _ in range(3)]
        world.requests.fail_all(RequestError(ErrorCode.UNAVAILABLE, "going down"))
        assert world.requests.num_live == 0
        for stream in streams:
            with pytest.raises(RequestError, match="going down"):
                await stream.next_batch()

    run(scenario())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("salt", ["\ud800", 1 << 64])
def test_unencodable_request_is_rejected_without_state(late: bool, salt: Any) -> None:
    async def scenario() -> None:
        world = World() if late else World().follow()
        send = world.requests._dispatcher._send
        world.requests._dispatcher._send = lambda role, index, message: (
            bool(codec.encode(message)) and send(role, index, message)
        )
        good = world.requests.submit(PROMPT, spec_of())
        with pytest.raises(RequestError) as caught:
            stream = world.requests.submit(PROMPT, spec_of(n=2, cache_salt=salt))
            world.follow()
            await stream.next_batch()
        assert caught.value.code is ErrorCode.INVALID
        assert world.requests.num_live == world.requests.ledger.num_open_choices == 1
        world.requests.fail_all(RequestError(ErrorCode.UNAVAILABLE, "going down"))
        assert world.requests.num_live == 0
        assert good.ended

    run(scenario())


@pytest.mark.parametrize("priority", [1 << 63, -(1 << 63) - 1])
def test_a_priority_has_64_bits(priority: int) -> None:
    world = World().follow()
    with pytest.raises(RequestError, match="64-bit"):
        world.requests.submit(PROMPT, spec_of(priority=priority))
    assert world.requests.num_live == 0
