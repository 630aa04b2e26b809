"""Several engines behind one frontend: routing, and migration when an engine fails."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.load_balancing.prefix_affinity import hash_prefixes
from quintet.frontend.resume.retained import resume_retained
from quintet.wire.codec import pack_i32, pack_i64, unpack_i64
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import (
    Admit,
    Cancel,
    FinishReason,
    InFlightReport,
    Live,
    Resumed,
    Submit,
    TokenPrompt,
    Unknown,
)
from quintet.wire.supervision import SlotState

from .test_live_requests import PROMPT, World, rest, run, spec_of


def engines(count: int) -> World:
    """Return a world with ``count`` ready engines."""
    world = World()
    for index in range(count):
        world.slots[Role.CORE, index] = world.slots[Role.EXECUTOR, index] = (1, SlotState.READY)
    return world.follow()


def cores(submits: Sequence[Submit]) -> list[int]:
    return [submit.core for submit in submits]


def test_requests_are_balanced_by_queued_tokens() -> None:
    async def scenario() -> None:
        world = engines(3)
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(6)]
        assert sorted(cores(world.of(Submit))) == [0, 0, 1, 1, 2, 2]
        for stream in [s for s in streams if s.submit.core == 1]:
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
        world.sent.clear()
        for _ in range(2):
            world.requests.submit(PROMPT, spec_of())
        assert cores(world.of(Submit)) == [1, 1]

    run(scenario())


def test_engine_with_unready_core_or_executor_gets_no_requests() -> None:
    async def scenario() -> None:
        world = engines(2)
        for role in (Role.EXECUTOR, Role.CORE):
            for state in (SlotState.STARTING, SlotState.STALLED, SlotState.RETIRING, SlotState.DOWN):
                world.slots[role, 0] = (1, state)
                world.follow()
                world.sent.clear()
                for _ in range(3):
                    world.requests.submit(PROMPT, spec_of())
                assert set(cores(world.of(Submit))) == {1}
            world.slots[role, 0] = (2, SlotState.READY)
        for role in (Role.EXECUTOR, Role.CORE):  # no engine is complete: the one with a core queues requests
            world.slots[role, 1 if role is Role.EXECUTOR else 0] = (2, SlotState.STARTING)
        world.follow()
        assert world.requests.workers.missing() == [Role.EXECUTOR]
        world.sent.clear()
        world.requests.submit(PROMPT, spec_of())
        assert cores(world.of(Submit)) == [1]

    run(scenario())


def test_requests_of_dead_executor_move_at_once() -> None:
    async def scenario() -> None:
        world = engines(2)
        streams = [world.requests.submit(PROMPT, spec_of(n=2)) for _ in range(4)]
        held = [stream for stream in streams if stream.submit.core == 0]
        prefilled, request_id = held[0], held[0].request_id
        world.text([(request_id, "ab", 0, 0, [1, 2])], started=[request_id])
        cancelled = held[1]
        cancelled.cancel()
        world.sent.clear()
        world.slots[Role.EXECUTOR, 0] = (1, SlotState.DOWN)
        world.follow()
        (forgotten,) = world.of(Cancel)
        assert (forgotten.request_ids, forgotten.core, forgotten.moved) == (
            [request_id, request_id + 1],
            0,
            True,
        )
        again = world.of(Submit)
        assert {(s.request_id, s.core, s.spec.attempt) for s in again} == {
            (request_id, 1, 1),
            (request_id + 1, 1, 1),
        }
        assert again[0].spec.output_ids == pack_i32([1, 2])
        world.text([(request_id, "c", 2, 2, [3])])
        world.text([], finished=[(request_id, FinishReason.STOP), (request_id + 1, FinishReason.STOP)])
        assert "".join(d.text for b in await rest(prefilled) for d in b.deltas if d.choice == 0) == "abc"
        assert not cancelled.ended  # the live core with the request answers

    run(scenario())


def test_request_that_killed_two_executors_stays_unless_it_progressed() -> None:
    """The core isolates poison; otherwise the request would kill every executor."""

    async def scenario() -> None:
        world = engines(2)
        suspect, innocent = world.requests.submit(PROMPT, spec_of()), world.requests.submit(PROMPT, spec_of())
        (at,) = {suspect.submit.core}
        assert innocent.submit.core == 1 - at
        world.slots[Role.EXECUTOR, at] = (2, SlotState.STARTING)
        world.follow()
        world.slots[Role.EXECUTOR, at] = (2, SlotState.READY)
        world.follow()
        assert suspect.submit.core == 1 - at
        world.sent.clear()
        world.slots[Role.EXECUTOR, 1 - at] = (2, SlotState.STARTING)
        world.follow()
        assert [submit.request_id for submit in world.of(Submit)] == [innocent.request_id]
        world.slots[Role.EXECUTOR, 1 - at] = (2, SlotState.READY)
        world.follow()
        request_id = suspect.request_id
        world.text([(request_id, "a" * 17, 0, 0, [1] * 17)], started=[request_id])
        world.slots[Role.EXECUTOR, 1 - at] = (3, SlotState.STARTING)
        world.follow()
        assert suspect.submit.core == at

    run(scenario())


def test_requests_leave_a_booting_engine_once_another_is_ready() -> None:
    async def scenario() -> None:
        world = engines(2)
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.STARTING)
        world.follow()
        stream = world.requests.submit(PROMPT, spec_of())
        assert stream.submit.core == 0
        world.slots[Role.CORE, 0] = (1, SlotState.DOWN)
        world.follow()
        assert stream.submit.core == 1, "its core queues the request"
        world.sent.clear()
        world.slots[Role.CORE, 0] = (2, SlotState.READY)
        world.follow()
        (forgotten,), (again,) = world.of(Cancel), world.of(Submit)
        assert (forgotten.request_ids, forgotten.core, forgotten.moved) == ([stream.request_id], 1, True)
        assert (again.core, again.spec.attempt) == (0, 2)

    run(scenario())


def test_requests_of_dead_executor_move_once_another_engine_is_ready() -> None:
    async def scenario() -> None:
        world = engines(2)
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.STARTING)
        world.follow()
        stream = world.requests.submit(PROMPT, spec_of())
        world.slots[Role.EXECUTOR, 0] = (2, SlotState.STARTING)
        world.follow()
        assert stream.submit.core == 0, "no engine is whole"
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.READY)
        world.follow()
        assert stream.submit.core == 1

    run(scenario())


def test_only_engine_keeps_requests_while_its_executor_is_replaced() -> None:
    async def scenario() -> None:
        world = engines(1)
        world.requests.submit(PROMPT, spec_of())
        world.sent.clear()
        world.slots[Role.EXECUTOR, 0] = (2, SlotState.STARTING)
        world.follow()
        assert world.sent == []

    run(scenario())


def test_lost_detokenizer_keeps_the_engine_of_a_request() -> None:
    async def scenario() -> None:
        world = engines(2)
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(4)]
        before = {stream.request_id: stream.submit.core for stream in streams}
        world.sent.clear()
        world.slots[Role.DETOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        assert {submit.request_id: submit.core for submit in world.of(Submit)} == before
        world.requests.resume_unknown(Unknown(pack_i64(list(before))))
        assert {submit.request_id: submit.core for submit in world.of(Submit)} == before

    run(scenario())


def test_request_of_lost_tokenizer_goes_to_the_same_engine() -> None:
    """It is the same attempt: two engines would both accept it."""

    async def scenario() -> None:
        world = engines(3)
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(5)]
        before = {stream.request_id: stream.submit.core for stream in streams}
        world.sent.clear()
        world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        again = world.of(Submit)
        assert {submit.request_id: submit.core for submit in again} == before
        assert all(submit.spec.attempt == 0 for submit in again)

    run(scenario())


def test_resumed_request_continues_at_its_core() -> None:
    async def scenario() -> None:
        world = engines(3)
        spec = spec_of(seed=1)
        for core in (2, 0):
            first = world.requests.take_ids(1)
            resumed = Resumed(1, Admit(7, pack_i32([5]), spec, 0), [(0, b"")], core)
            resume_retained(
                world.requests,
                resumed,
                first,
                [(None, False)],
                world.requests.submit(PROMPT, spec_of()).mailbox,
                1,
            )
            assert world.of(Submit)[-1].core == core
        world.slots[Role.CORE, 2] = (1, SlotState.DOWN)
        world.sent.clear()
        world.follow()
        assert 2 not in cores(world.of(Submit)) and world.of(Submit)

    run(scenario())


def test_resumed_request_counts_as_live() -> None:
    async def scenario() -> None:
        world = engines(1)
        resumed = Resumed(1, Admit(7, pack_i32([5]), spec_of(), 0), [(0, b"")], 0)
        other = world.requests.submit(PROMPT, spec_of())
        resume_retained(
            world.requests, resumed, world.requests.take_ids(1), [(None, False)], other.mailbox, 1
        )
        assert world.requests.metrics.live.value == 2

    run(scenario())


def test_each_core_receives_its_live_requests() -> None:
    async def scenario() -> None:
        world = engines(2)
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(4)]
        world.unreachable = True
        parked = world.requests.submit(PROMPT, spec_of())
        accounts = list(world.requests.in_flight_reports())
        for core in (0, 1):
            own_requests = [stream.request_id for stream in streams if stream.submit.core == core]
            (live,) = [a for role, index, a in accounts if (role, index) == (Role.CORE, core)]
            assert isinstance(live, Live) and live.sender == WorkerId(Role.FRONTEND, 0, 1)
            assert list(unpack_i64(live.request_ids)) == [*own_requests, parked.request_id]
            (reported,) = [a for _, _, a in accounts if isinstance(a, InFlightReport) and a.core == core]
            assert list(unpack_i64(reported.request_ids)) == own_requests

    run(scenario())


LONG = TokenPrompt(pack_i32(list(range(640))))


def queued(world: World, index: int) -> int:
    return world.requests.ledger.engine(index).num_queued


def test_requests_without_cache_reads_do_not_change_affinity() -> None:
    """Such a request does not use prefix affinity, and does not remove the known prefix."""

    async def scenario() -> None:
        world = engines(2)
        prompt_known = world.requests.submit(LONG, spec_of())
        request_id, at = prompt_known.request_id, prompt_known.submit.core
        world.text([], started=[request_id], finished=[(request_id, FinishReason.STOP)])
        for uncached in ({"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}):
            streams = [world.requests.submit(LONG, spec_of(**uncached)) for _ in range(2)]
            assert sorted(stream.submit.core for stream in streams) == [0, 1]
            for stream in streams:
                assert world.requests.ledger.of(stream).num_queued == 640
                request_id = stream.request_id
                world.text([], started=[request_id], finished=[(request_id, FinishReason.STOP)])
        history = world.requests._dispatcher.selector.history(at)
        assert history.prefixes.find(hash_prefixes(LONG))[0] == 10

    run(scenario())


def test_adapters_share_no_affinity() -> None:
    """Their KV blocks differ: the first request of an adapter goes to the engine with fewer tokens."""

    async def scenario() -> None:
        world = engines(2)
        first = world.requests.submit(LONG, spec_of())
        world.text([], started=[first.request_id], finished=[(first.request_id, FinishReason.STOP)])
        at = first.submit.core
        streams = [world.requests.submit(LONG, spec_of(adapter=each)) for each in (b"a", b"b")]
        assert sorted(each.submit.core for each in streams) == [0, 1]
        for each in streams:
            world.text([], started=[each.request_id], finished=[(each.request_id, FinishReason.STOP)])
        again = [world.requests.submit(LONG, spec_of(adapter=each)) for each in (b"b", b"a", b"")]
        assert [each.submit.core for each in again] == [*(e.submit.core for e in streams[::-1]), at]

    run(scenario())


def test_moved_request_counts_all_its_tokens_until_prefilled() -> None:
    async def scenario() -> None:
        world = engines(2)
        stream = world.requests.submit(LONG, spec_of(n=2))
        request_id, at = stream.request_id, stream.submit.core
        world.text([(request_id, "abc", 0, 0, [1, 2, 3])], started=[request_id])
        assert queued(world, at) == 0
        world.slots[Role.EXECUTOR, at] = (2, SlotState.STARTING)
        world.follow()
        assert (queued(world, at), queued(world, 1 - at)) == (0, 643)
        world.text([], started=[request_id])
        assert queued(world, 1 - at) == 0
        world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)  # the same attempt again: prefill has started
        world.follow()
        assert (stream.submit.core, queued(world, 1 - at)) == (1 - at, 0)
        world.text([], finished=[(request_id, FinishReason.STOP), (request_id + 1, FinishReason.STOP)])
        assert (queued(world, at), queued(world, 1 - at)) == (0, 0)

    run(scenario())


def test_little_progress_of_many_choices_stays_suspect() -> None:
    async def scenario() -> None:
        world = engines(3)
        stream = world.requests.submit(PROMPT, spec_of(n=20))
        request_id, chosen = stream.request_id, [stream.submit.core]
        for count in range(3):
            world.text([(request_id + i, "a", count, count, [1]) for i in range(20)], started=[request_id])
            world.slots[Role.EXECUTOR, stream.submit.core] = (2 + count, SlotState.STARTING)
            world.follow()
            chosen.append(stream.submit.core)
        assert len(set(chosen)) == 2

    run(scenario())


def test_full_engine_gets_no_request_that_fits_elsewhere() -> None:
    """One engine has memory for 8 192 tokens, and the other has more queued work."""

    def prompt(number: int, num_tokens: int) -> TokenPrompt:
        return TokenPrompt(pack_i32(range(7000 * number, 7000 * number + num_tokens)))

    async def scenario() -> None:
        world = engines(2)
        world.slots[Role.CORE, 1] = (1, SlotState.STALLED)
        world.follow()
        held = [world.requests.submit(prompt(number, 3000), spec_of()) for number in range(2)]
        world.text([], started=[stream.request_id for stream in held])
        world.slots[Role.CORE, 0], world.slots[Role.CORE, 1] = (1, SlotState.STALLED), (1, SlotState.READY)
        world.follow()
        for number in range(2, 6):
            world.requests.submit(prompt(number, 200), spec_of())
        world.slots[Role.CORE, 0] = (1, SlotState.READY)
        world.follow()
        world.sent.clear()
        world.requests.submit(prompt(6, 3000), spec_of())
        world.requests.submit(prompt(7, 200), spec_of())
        world.text([], finished=[(held[0].request_id, FinishReason.STOP)])
        world.requests.submit(prompt(8, 3000), spec_of())
        assert cores(world.of(Submit)) == [1, 0, 0]

    run(scenario())


def test_engine_with_slow_ttft_gets_fewer_requests() -> None:
    """Requests of two engines in turn; each starts after its reported time."""

    async def scenario() -> None:
        world = engines(2)
        for number in range(300):
            stream = world.requests.submit(PROMPT, spec_of())
            stream.submit.sent_ns -= 1_000_000_000 if stream.submit.core else 100_000_000
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
            if number == 63:
                world.sent.clear()  # measured from now on
        counts = cores(world.of(Submit))[-100:]
        assert counts.count(1) < 10, "an idle faster engine is always available"

    run(scenario())


def test_replayed_outputs_are_prefilled_and_not_measured() -> None:
    """They are in no prefix cache, so their prefill time is not measured."""

    async def scenario() -> None:
        world = engines(2)
        replayed = pack_i32(list(range(100)))
        for _ in range(300):
            stream = world.requests.submit(
                LONG, spec_of(skip_reading_prefix_cache=True, output_ids=replayed, replays=bool(replayed))
            )
            assert queued(world, stream.submit.core) == 740
            stream.submit.sent_ns -= 1_000_000_000 if stream.submit.core else 100_000_000
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
        counts = cores(world.of(Submit))[-100:]
        assert counts.count(0) == counts.count(1) == 50

    run(scenario())


def test_load_is_scaled_by_the_number_of_frontends() -> None:
    """Each frontend knows only its own requests."""

    async def scenario() -> None:
        world = engines(2)
        for index in range(2):
            world.slots[Role.FRONTEND, index] = (1, SlotState.READY)
        world.slots[Role.CORE, 1] = (1, SlotState.STALLED)
        world.follow()
        first = world.requests.submit(TokenPrompt(pack_i32(range(2500))), spec_of())
        world.text([], started=[first.request_id])
        world.slots[Role.CORE, 0], world.slots[Role.CORE, 1] = (1, SlotState.STALLED), (1, SlotState.READY)
        world.follow()
        world.requests.submit(TokenPrompt(pack_i32(range(7000, 8000))), spec_of())
        world.slots[Role.CORE, 0] = (1, SlotState.READY)
        world.follow()
        world.sent.clear()
        world.requests.submit(TokenPrompt(pack_i32(range(9000, 11_000))), spec_of())
        world.requests.submit(TokenPrompt(pack_i32(range(20_000, 20_500))), spec_of())
        assert cores(world.of(Submit)) == [1, 0]

    run(scenario())
