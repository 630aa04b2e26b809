"""Several engines behind one frontend: which one a request goes to, and where it goes on when its engine is hurt."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.load_balancing.prefix_affinity import hash_prefixes
from quintet.wire.codec import pack_i32, unpack_i64
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import (
    Admit,
    Cancel,
    FinishReason,
    InFlightReport,
    Live,
    Reclaimed,
    Submit,
    TokenPrompt,
)
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import SlotState

from .test_sessions import PROMPT, World, params, rest, run


def engines(count: int) -> World:
    """Return a world with so many whole engines."""
    world = World()
    for index in range(count):
        world.slots[Role.CORE, index] = world.slots[Role.EXECUTOR, index] = (1, SlotState.READY)
    return world.follow()


def cores(submits: Sequence[Submit]) -> list[int]:
    return [submit.core for submit in submits]


def test_requests_are_spread_over_engines_by_what_is_to_be_done_there() -> None:
    async def story() -> None:
        world = engines(3)
        streams = [world.sessions.submit(PROMPT, params()) for _ in range(6)]
        assert sorted(cores(world.of(Submit))) == [0, 0, 1, 1, 2, 2]
        for stream in [s for s in streams if s.submit.core == 1]:
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
        world.sent.clear()
        for _ in range(2):
            world.sessions.submit(PROMPT, params())
        assert cores(world.of(Submit)) == [1, 1]

    run(story())


def test_an_engine_gets_nothing_new_while_its_core_or_executor_is_not_well() -> None:
    async def story() -> None:
        world = engines(2)
        for role in (Role.EXECUTOR, Role.CORE):
            for state in (SlotState.STARTING, SlotState.STALLED, SlotState.RETIRING, SlotState.DOWN):
                world.slots[role, 0] = (1, state)
                world.follow()
                world.sent.clear()
                for _ in range(3):
                    world.sessions.submit(PROMPT, params())
                assert set(cores(world.of(Submit))) == {1}
            world.slots[role, 0] = (2, SlotState.READY)
        for role in (Role.EXECUTOR, Role.CORE):  # neither is whole: whose core is there queues them
            world.slots[role, 1 if role is Role.EXECUTOR else 0] = (2, SlotState.STARTING)
        world.follow()
        assert world.sessions.slots.missing() == [Role.EXECUTOR]
        world.sent.clear()
        world.sessions.submit(PROMPT, params())
        assert cores(world.of(Submit)) == [1]

    run(story())


def test_what_a_dead_executor_was_to_compute_goes_on_at_another_engine_at_once() -> None:
    async def story() -> None:
        world = engines(2)
        streams = [world.sessions.submit(PROMPT, params(n=2)) for _ in range(4)]
        held = [stream for stream in streams if stream.submit.core == 0]
        begun, rid = held[0], held[0].request_id
        world.text([(rid, "ab", 0, 0, [1, 2])], started=[rid])
        cancelled = held[1]
        cancelled.cancel()
        world.sent.clear()
        world.slots[Role.EXECUTOR, 0] = (1, SlotState.DOWN)
        world.follow()
        (forgotten,) = world.of(Cancel)
        assert (forgotten.request_ids, forgotten.core, forgotten.moved) == ([rid, rid + 1], 0, True)
        again = world.of(Submit)
        assert {(s.request_id, s.core, s.spec.attempt) for s in again} == {(rid, 1, 1), (rid + 1, 1, 1)}
        assert again[0].spec.output_ids == pack_i32([1, 2])
        world.text([(rid, "c", 2, 2, [3])])
        world.text([], finished=[(rid, FinishReason.STOP), (rid + 1, FinishReason.STOP)])
        assert "".join(d.text for b in await rest(begun) for d in b.deltas if d.choice == 0) == "abc"
        assert not cancelled.ended  # the core that has it lives, and answers

    run(story())


def test_a_request_that_two_executors_died_of_stays_with_the_second_unless_it_came_further() -> None:
    """Its core finds out whether it is to blame; else it would go round until nobody is left."""

    async def story() -> None:
        world = engines(2)
        suspect, innocent = world.sessions.submit(PROMPT, params()), world.sessions.submit(PROMPT, params())
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
        rid = suspect.request_id
        world.text([(rid, "a" * 17, 0, 0, [1] * 17)], started=[rid])
        world.slots[Role.EXECUTOR, 1 - at] = (3, SlotState.STARTING)
        world.follow()
        assert suspect.submit.core == at

    run(story())


def test_requests_leave_an_engine_that_still_boots_once_another_is_whole() -> None:
    async def story() -> None:
        world = engines(2)
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.STARTING)
        world.follow()
        stream = world.sessions.submit(PROMPT, params())
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

    run(story())


def test_requests_of_a_dead_executor_move_as_soon_as_another_engine_has_booted() -> None:
    async def story() -> None:
        world = engines(2)
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.STARTING)
        world.follow()
        stream = world.sessions.submit(PROMPT, params())
        world.slots[Role.EXECUTOR, 0] = (2, SlotState.STARTING)
        world.follow()
        assert stream.submit.core == 0, "no engine is whole"
        world.slots[Role.EXECUTOR, 1] = (1, SlotState.READY)
        world.follow()
        assert stream.submit.core == 1

    run(story())


def test_the_only_engine_keeps_its_requests_while_its_executor_is_replaced() -> None:
    async def story() -> None:
        world = engines(1)
        world.sessions.submit(PROMPT, params())
        world.sent.clear()
        world.slots[Role.EXECUTOR, 0] = (2, SlotState.STARTING)
        world.follow()
        assert world.sent == []

    run(story())


def test_a_lost_detokenizer_does_not_take_a_request_from_its_engine() -> None:
    async def story() -> None:
        world = engines(2)
        streams = [world.sessions.submit(PROMPT, params()) for _ in range(4)]
        before = {stream.request_id: stream.submit.core for stream in streams}
        world.sent.clear()
        world.slots[Role.DETOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        assert {submit.request_id: submit.core for submit in world.of(Submit)} == before
        world.sessions.resend(list(before))
        assert {submit.request_id: submit.core for submit in world.of(Submit)} == before

    run(story())


def test_what_a_lost_tokenizer_may_have_passed_on_goes_the_same_way_again() -> None:
    """It is the same attempt: two engines would both take it."""

    async def story() -> None:
        world = engines(3)
        streams = [world.sessions.submit(PROMPT, params()) for _ in range(5)]
        before = {stream.request_id: stream.submit.core for stream in streams}
        world.sent.clear()
        world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)
        world.follow()
        again = world.of(Submit)
        assert {submit.request_id: submit.core for submit in again} == before
        assert all(submit.spec.attempt == 0 for submit in again)

    run(story())


def test_a_reclaimed_request_goes_on_at_the_core_that_keeps_it() -> None:
    async def story() -> None:
        world = engines(3)
        spec = RequestSpec(params(seed=1), 0, 0)
        for core in (2, 0):
            first = world.sessions.take_ids(1)
            reclaimed = Reclaimed(1, Admit(7, pack_i32([5]), spec, 0), [(0, b"")], core)
            world.sessions.reattach(
                reclaimed, first, [(None, False)], world.sessions.submit(PROMPT, params()).mailbox, 1
            )
            assert world.of(Submit)[-1].core == core
        world.slots[Role.CORE, 2] = (1, SlotState.DOWN)
        world.sent.clear()
        world.follow()
        assert 2 not in cores(world.of(Submit)) and world.of(Submit)

    run(story())


def test_a_reclaimed_request_is_one_that_lives() -> None:
    async def story() -> None:
        world = engines(1)
        reclaimed = Reclaimed(1, Admit(7, pack_i32([5]), RequestSpec(params(), 0, 0), 0), [(0, b"")], 0)
        other = world.sessions.submit(PROMPT, params())
        world.sessions.reattach(reclaimed, world.sessions.take_ids(1), [(None, False)], other.mailbox, 1)
        assert world.sessions.metrics.live.value == 2

    run(story())


def test_each_core_hears_which_of_its_requests_are_waited_for() -> None:
    async def story() -> None:
        world = engines(2)
        streams = [world.sessions.submit(PROMPT, params()) for _ in range(4)]
        world.deaf = True
        parked = world.sessions.submit(PROMPT, params())
        accounts = list(world.sessions.in_flight_reports())
        for core in (0, 1):
            ours = [stream.request_id for stream in streams if stream.submit.core == core]
            (live,) = [a for role, index, a in accounts if (role, index) == (Role.CORE, core)]
            assert isinstance(live, Live) and live.sender == WorkerId(Role.FRONTEND, 0, 1)
            assert list(unpack_i64(live.request_ids)) == [*ours, parked.request_id]
            (handed,) = [a for _, _, a in accounts if isinstance(a, InFlightReport) and a.core == core]
            assert list(unpack_i64(handed.request_ids)) == ours

    run(story())


LONG = TokenPrompt(pack_i32(list(range(640))))


def queued(world: World, index: int) -> int:
    return world.sessions._dispatcher._engines._load_of(index).num_queued


def test_who_may_not_read_the_cache_says_nothing_about_it() -> None:
    """Such a request is no reason to go where its beginning is known, nor to believe that it is not known there any more."""

    async def story() -> None:
        world = engines(2)
        knows = world.sessions.submit(LONG, params())
        rid, at = knows.request_id, knows.submit.core
        world.text([], started=[rid], finished=[(rid, FinishReason.STOP)])
        for blind in ({"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}):
            streams = [world.sessions.submit(LONG, params(**blind)) for _ in range(2)]
            assert sorted(stream.submit.core for stream in streams) == [0, 1]
            for stream in streams:
                assert stream.num_queued == 640
                rid = stream.request_id
                world.text([], started=[rid], finished=[(rid, FinishReason.STOP)])
        engine = world.sessions._dispatcher._engines._load_of(at)
        assert engine.prefixes.find(hash_prefixes(LONG))[0] == 10

    run(story())


def test_a_request_that_moves_is_queued_with_all_its_tokens_until_they_are_computed() -> None:
    async def story() -> None:
        world = engines(2)
        stream = world.sessions.submit(LONG, params(n=2))
        rid, at = stream.request_id, stream.submit.core
        world.text([(rid, "abc", 0, 0, [1, 2, 3])], started=[rid])
        assert queued(world, at) == 0
        world.slots[Role.EXECUTOR, at] = (2, SlotState.STARTING)
        world.follow()
        assert (queued(world, at), queued(world, 1 - at)) == (0, 643)
        world.text([], started=[rid])
        assert queued(world, 1 - at) == 0
        world.slots[Role.TOKENIZER, 0] = (2, SlotState.READY)  # the same attempt again: it was begun
        world.follow()
        assert (stream.submit.core, queued(world, 1 - at)) == (1 - at, 0)
        world.text([], finished=[(rid, FinishReason.STOP), (rid + 1, FinishReason.STOP)])
        assert (queued(world, at), queued(world, 1 - at)) == (0, 0)

    run(story())


def test_many_choices_that_come_a_little_further_are_still_suspect() -> None:
    async def story() -> None:
        world = engines(3)
        stream = world.sessions.submit(PROMPT, params(n=20))
        rid, visited = stream.request_id, [stream.submit.core]
        for count in range(3):
            world.text([(rid + i, "a", count, count, [1]) for i in range(20)], started=[rid])
            world.slots[Role.EXECUTOR, stream.submit.core] = (2 + count, SlotState.STARTING)
            world.follow()
            visited.append(stream.submit.core)
        assert len(set(visited)) == 2

    run(story())


def test_an_engine_whose_memory_is_taken_gets_nothing_that_another_can_hold() -> None:
    """One engine's memory has 8 192 tokens, and the other has more to do."""

    def prompt(number: int, num_tokens: int) -> TokenPrompt:
        return TokenPrompt(pack_i32(range(7000 * number, 7000 * number + num_tokens)))

    async def story() -> None:
        world = engines(2)
        world.slots[Role.CORE, 1] = (1, SlotState.STALLED)
        world.follow()
        held = [world.sessions.submit(prompt(number, 3000), params()) for number in range(2)]
        world.text([], started=[stream.request_id for stream in held])
        world.slots[Role.CORE, 0], world.slots[Role.CORE, 1] = (1, SlotState.STALLED), (1, SlotState.READY)
        world.follow()
        for number in range(2, 6):
            world.sessions.submit(prompt(number, 200), params())
        world.slots[Role.CORE, 0] = (1, SlotState.READY)
        world.follow()
        world.sent.clear()
        world.sessions.submit(prompt(6, 3000), params())
        world.sessions.submit(prompt(7, 200), params())
        world.text([], finished=[(held[0].request_id, FinishReason.STOP)])
        world.sessions.submit(prompt(8, 3000), params())
        assert cores(world.of(Submit)) == [1, 0, 0]

    run(story())


def test_an_engine_that_is_slow_to_begin_gets_less() -> None:
    """Requests of two engines, one after the other, that begin after as long as they say they were under way."""

    async def story() -> None:
        world = engines(2)
        for number in range(300):
            stream = world.sessions.submit(PROMPT, params())
            stream.submit.sent_ns -= 1_000_000_000 if stream.submit.core else 100_000_000
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
            if number == 63:
                world.sent.clear()  # from now on something is known
        counts = cores(world.of(Submit))[-100:]
        assert counts.count(1) < 10, "an idle engine that is faster is always there"

    run(story())


def test_outputs_that_are_told_are_to_be_computed_and_say_nothing_of_an_engine() -> None:
    """Nobody else's beginning has them, so how long it takes is no measure."""

    async def story() -> None:
        world = engines(2)
        told = pack_i32(list(range(100)))
        for _ in range(300):
            stream = world.sessions.submit(LONG, params(skip_reading_prefix_cache=True), replayed_ids=told)
            assert queued(world, stream.submit.core) == 740
            stream.submit.sent_ns -= 1_000_000_000 if stream.submit.core else 100_000_000
            world.text([], started=[stream.request_id], finished=[(stream.request_id, FinishReason.STOP)])
        counts = cores(world.of(Submit))[-100:]
        assert counts.count(0) == counts.count(1) == 50

    run(story())


def test_what_several_frontends_have_is_taken_to_be_as_much() -> None:
    """Each knows only what it sent."""

    async def story() -> None:
        world = engines(2)
        for index in range(2):
            world.slots[Role.FRONTEND, index] = (1, SlotState.READY)
        world.slots[Role.CORE, 1] = (1, SlotState.STALLED)
        world.follow()
        first = world.sessions.submit(TokenPrompt(pack_i32(range(2500))), params())
        world.text([], started=[first.request_id])
        world.slots[Role.CORE, 0], world.slots[Role.CORE, 1] = (1, SlotState.STALLED), (1, SlotState.READY)
        world.follow()
        world.sessions.submit(TokenPrompt(pack_i32(range(7000, 8000))), params())
        world.slots[Role.CORE, 0] = (1, SlotState.READY)
        world.follow()
        world.sent.clear()
        world.sessions.submit(TokenPrompt(pack_i32(range(9000, 11_000))), params())
        world.sessions.submit(TokenPrompt(pack_i32(range(20_000, 20_500))), params())
        assert cores(world.of(Submit)) == [1, 0]

    run(story())
