"""Requests with a deadline: refused when hopeless, ended when late, and left alone otherwise."""

from __future__ import annotations

import pytest

from quintet.core.requests.deadlines import num_certain_outputs, predict
from quintet.core.throughput import Throughput
from quintet.wire.messages import FinishReason

from .fake import World

MS = 1_000_000
STEP_NS = 10 * MS
PROMPT = list(range(10, 20))


class TimedWorld(World):
    """A world in which every step takes ten milliseconds, whatever is in it."""

    def tick(self) -> int:
        return self.now

    def step(self) -> None:
        self.apply(self.engine.expire(self.now))
        while self.plan() is not None:
            pass
        self.now += STEP_NS
        self.commit()

    def ask(self, request_id: int, within_ns: int = 0, max_tokens: int = 20, **options: object) -> bool:
        """Send a request that is to end within this time, and has an output of known length; return whether it may stay."""
        deadline_ns = self.now + within_ns if within_ns else 0
        self.admit(
            request_id,
            [request_id, *PROMPT],
            max_tokens=max_tokens,
            ignore_eos=True,
            deadline_ns=deadline_ns,
            **options,
        )
        return request_id not in self.failed

    def serve(self, *request_ids: int, max_tokens: int = 20) -> None:
        """Let these requests run to their end: now the pace is known."""
        for request_id in request_ids:
            self.ask(request_id, max_tokens=max_tokens)
        self.run()

    @property
    def state(self):  # type: ignore[no-untyped-def]
        assert self.engine.state is not None
        return self.engine.state


def test_an_expired_request_is_in_no_later_plan_and_leaves_nothing() -> None:
    world = TimedWorld(max_steps_in_flight=1)
    world.ask(1, within_ns=3 * STEP_NS)
    world.ask(2)
    for _ in range(3):
        world.step()
    assert len(world.outcomes[1].tokens) == 3
    world.step()
    assert world.outcomes[1].finish is FinishReason.ABORT
    assert len(world.outcomes[1].tokens) == 3
    world.run()
    assert world.outcomes[2].finish is FinishReason.LENGTH
    assert world.state.counters.expired == 1
    world.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_waits_expires_without_having_entered(depth: int) -> None:
    world = TimedWorld(slots=1, max_steps_in_flight=depth)
    world.ask(1)
    world.ask(2, within_ns=2 * STEP_NS)
    for _ in range(4):
        world.step()
    assert (world.outcomes[2].finish, world.outcomes[2].tokens) == (FinishReason.ABORT, [])
    assert [request.request_id for request in world.state.live.values()] == [1]
    world.run()
    world.assert_idle()


def test_every_choice_expires() -> None:
    world = TimedWorld(slots=2)
    world.ask(10, within_ns=4 * STEP_NS, n=3, temperature=1.0)
    for _ in range(6):
        world.step()
    assert [world.outcomes[10 + choice].finish for choice in range(3)] == [FinishReason.ABORT] * 3
    while world.commit():
        pass
    world.assert_idle()


def test_who_ended_in_time_does_not_expire() -> None:
    world = TimedWorld()
    for request_id in range(1, 1000):
        world.ask(request_id, within_ns=1000 * STEP_NS, max_tokens=1)
        world.run()
    world.now += 2000 * STEP_NS
    assert not world.engine.expire(world.now).tokens
    assert world.state.counters.expired == 0
    assert len(world.engine._deadlines) < 500


def test_a_request_that_comes_after_its_deadline_is_refused() -> None:
    world = TimedWorld()
    world.now = 50 * MS
    world.admit(1, PROMPT, deadline_ns=20 * MS)
    assert "0.03 s after its deadline" in world.failed[1]


def test_a_queue_that_is_too_long_is_no_place_for_a_request_with_a_deadline() -> None:
    world = TimedWorld(slots=2, max_steps_in_flight=1)
    world.serve(1, 2)
    for request_id in range(10, 16):
        assert world.ask(request_id)
    # Two slots are held for 20 steps at a time; three pairs are before it, and its own 20 outputs come after them.
    forecast = predict(world.state, world.engine._scheduler, world.state.waiting[-1])
    assert forecast.num_ahead == 5
    assert not world.ask(20, within_ns=70 * STEP_NS)
    assert "6 requests are queued before it" in world.failed[20]
    assert world.ask(21, within_ns=120 * STEP_NS)
    assert world.state.counters.deadline_rejections == 1
    begun_ns = world.now
    while world.outcomes.get(21) is None or not world.outcomes[21].tokens:
        world.step()
    assert 60 * STEP_NS <= world.now - begun_ns <= 62 * STEP_NS
    world.run()
    assert world.outcomes[21].finish is FinishReason.LENGTH


def test_the_prediction_is_right_to_a_few_steps() -> None:
    world = TimedWorld(slots=3, max_steps_in_flight=2, num_blocks=256)
    world.serve(1, 2, 3)
    for request_id in range(10, 17):
        world.ask(request_id)
        world.step()  # so that slots become free at different times
    world.ask(20)
    request = world.state.live[20]
    world.state.waiting.remove(request)
    forecast = predict(world.state, world.engine._scheduler, request)
    world.state.waiting.append(request)
    begun_ns = world.now
    while request.first_token_ns is None:
        world.step()
    assert abs((request.first_token_ns - begun_ns) - forecast.first_token_ns) <= 3 * STEP_NS
    world.run()
    assert abs((world.now - begun_ns) - forecast.end_ns) <= 4 * STEP_NS


def test_memory_that_holds_few_is_known_to_delay_like_slots_that_are_few() -> None:
    world = TimedWorld(
        slots=8, num_blocks=16, block_size=4, max_steps_in_flight=1, prefix_caching=False
    )  # two of 31 tokens
    world.serve(1, 2)
    for request_id in range(10, 16):
        world.ask(request_id)
    assert not world.ask(20, within_ns=40 * STEP_NS)


def test_the_alone_and_the_unmeasured_are_never_refused() -> None:
    world = TimedWorld(slots=1)
    assert world.ask(1, within_ns=1)
    assert world.ask(2, within_ns=1)  # nothing was measured yet
    world.now += STEP_NS
    world.apply(world.engine.expire(world.now))
    world.serve(3)
    assert world.ask(4, within_ns=1)


def test_without_prediction_only_time_itself_decides() -> None:
    world = TimedWorld(slots=1, deadline_admission=False)
    world.serve(1)
    world.ask(2)
    assert world.ask(3, within_ns=2 * STEP_NS)
    for _ in range(4):
        world.step()
    assert world.outcomes[3].finish is FinishReason.ABORT


def test_what_was_admitted_once_is_not_refused_when_it_comes_again() -> None:
    world = TimedWorld(slots=1)
    world.serve(1)
    world.ask(2)
    assert not world.ask(3, within_ns=2 * STEP_NS)
    assert world.ask(4, within_ns=2 * STEP_NS, attempt=1)


def test_outputs_that_may_end_early_are_not_held_against_a_request() -> None:
    world = TimedWorld(slots=4)
    world.serve(1)
    world.ask(2)
    world.admit(3, PROMPT, max_tokens=100, deadline_ns=world.now + 8 * STEP_NS)
    assert 3 not in world.failed and num_certain_outputs(world.state.live[3]) == 1
    world.admit(4, PROMPT, max_tokens=100, min_tokens=50, deadline_ns=world.now + 8 * STEP_NS)
    assert 4 in world.failed


def test_steps_are_told_apart_by_what_is_in_them() -> None:
    pace = Throughput()
    now = 0
    for _ in range(50):
        now += 10 * MS
        pace.note_step(4, 4, now - 5 * MS, now)
        now += 110 * MS
        pace.note_step(5, 105, now - 115 * MS, now)
    assert pace.decode_ns.value == pytest.approx(10 * MS, rel=0.5)  # it was planned half a step before
    assert pace.token_ns.value == pytest.approx(1 * MS, rel=0.1)


def test_a_process_that_was_stopped_is_no_measure() -> None:
    pace = Throughput()
    for step in range(40):
        pace.note_step(4, 4, step * 10 * MS, (step + 1) * 10 * MS)
    pace.note_step(4, 4, 400 * MS, 60_000 * MS)
    assert pace.step_ns.value < 15 * MS
