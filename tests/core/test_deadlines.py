"""Deadline admission: hopeless requests are rejected, late ones ended."""

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
    """World in which every step takes ten milliseconds."""

    def tick(self) -> int:
        return self.now

    def step(self) -> None:
        self.apply(self.engine.expire(self.now))
        while self.plan() is not None:
            pass
        self.now += STEP_NS
        self.commit()

    def send(self, request_id: int, within_ns: int = 0, max_tokens: int = 20, **options: object) -> bool:
        """Send a request with this deadline and a known output length; return whether it is admitted."""
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
        """Run these requests to their end, so that the throughput is measured."""
        for request_id in request_ids:
            self.send(request_id, max_tokens=max_tokens)
        self.run()

    @property
    def state(self):  # type: ignore[no-untyped-def]
        assert self.engine.state is not None
        return self.engine.state


def test_expired_request_leaves_plans_and_state() -> None:
    world = TimedWorld(max_steps_in_flight=1)
    world.send(1, within_ns=3 * STEP_NS)
    world.send(2)
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
def test_waiting_request_expires_without_being_scheduled(depth: int) -> None:
    world = TimedWorld(slots=1, max_steps_in_flight=depth)
    world.send(1)
    world.send(2, within_ns=2 * STEP_NS)
    for _ in range(4):
        world.step()
    assert (world.outcomes[2].finish, world.outcomes[2].tokens) == (FinishReason.ABORT, [])
    assert [request.request_id for request in world.state.live.values()] == [1]
    world.run()
    world.assert_idle()


def test_every_choice_expires() -> None:
    world = TimedWorld(slots=2)
    world.send(10, within_ns=4 * STEP_NS, n=3, temperature=1.0)
    for _ in range(6):
        world.step()
    assert [world.outcomes[10 + choice].finish for choice in range(3)] == [FinishReason.ABORT] * 3
    while world.commit():
        pass
    world.assert_idle()


def test_finished_request_does_not_expire() -> None:
    world = TimedWorld()
    for request_id in range(1, 1000):
        world.send(request_id, within_ns=1000 * STEP_NS, max_tokens=1)
        world.run()
    world.now += 2000 * STEP_NS
    assert not world.engine.expire(world.now).tokens
    assert world.state.counters.expired == 0
    assert len(world.engine.deadlines.entries) < 500


def test_request_past_its_deadline_is_rejected() -> None:
    world = TimedWorld()
    world.now = 50 * MS
    world.admit(1, PROMPT, deadline_ns=20 * MS)
    assert "0.03 s after its deadline" in world.failed[1]
    assert world.state.counters.expired == 1


def test_expired_choices_are_counted_on_arrival() -> None:
    world = TimedWorld()
    world.now = 50 * MS
    world.admit(1, PROMPT, deadline_ns=20 * MS, n=3)
    assert world.state.counters.expired == 3


def test_long_queue_rejects_request_with_deadline() -> None:
    world = TimedWorld(slots=2, max_steps_in_flight=1)
    world.serve(1, 2)
    for request_id in range(10, 16):
        assert world.send(request_id)
    # Two slots are held for 20 steps at a time. Three pairs are queued before the request, which then takes 20 steps.
    forecast = predict(world.state, world.engine._scheduler, world.state.waiting[-1])
    assert forecast.num_ahead == 5
    assert not world.send(20, within_ns=70 * STEP_NS)
    assert "6 requests are queued before it" in world.failed[20]
    assert world.send(21, within_ns=120 * STEP_NS)
    assert world.state.counters.deadline_rejections == 1
    start_ns = world.now
    while world.outcomes.get(21) is None or not world.outcomes[21].tokens:
        world.step()
    assert 60 * STEP_NS <= world.now - start_ns <= 62 * STEP_NS
    world.run()
    assert world.outcomes[21].finish is FinishReason.LENGTH


def test_forecast_is_within_a_few_steps() -> None:
    world = TimedWorld(slots=3, max_steps_in_flight=2, num_blocks=256)
    world.serve(1, 2, 3)
    for request_id in range(10, 17):
        world.send(request_id)
        world.step()  # slots become free at different times
    world.send(20)
    request = world.state.live[20]
    world.state.waiting.remove(request)
    forecast = predict(world.state, world.engine._scheduler, request)
    world.state.waiting.append(request)
    start_ns = world.now
    while request.stats.first_token_ns is None:
        world.step()
    assert abs((request.stats.first_token_ns - start_ns) - forecast.first_token_ns) <= 3 * STEP_NS
    world.run()
    assert abs((world.now - start_ns) - forecast.end_ns) <= 4 * STEP_NS


def test_forecast_counts_memory_like_slots() -> None:
    world = TimedWorld(
        slots=8, num_blocks=16, block_size=4, max_steps_in_flight=1, prefix_caching=False
    )  # two of 31 tokens
    world.serve(1, 2)
    for request_id in range(10, 16):
        world.send(request_id)
    assert not world.send(20, within_ns=40 * STEP_NS)


def test_lone_and_unmeasured_requests_are_never_rejected() -> None:
    world = TimedWorld(slots=1)
    assert world.send(1, within_ns=1)
    assert world.send(2, within_ns=1)  # nothing has been measured
    world.now += STEP_NS
    world.apply(world.engine.expire(world.now))
    world.serve(3)
    assert world.send(4, within_ns=1)


def test_without_forecast_only_past_deadlines_reject() -> None:
    world = TimedWorld(slots=1, deadline_admission=False)
    world.serve(1)
    world.send(2)
    assert world.send(3, within_ns=2 * STEP_NS)
    for _ in range(4):
        world.step()
    assert world.outcomes[3].finish is FinishReason.ABORT


def test_new_attempt_of_admitted_request_is_not_rejected() -> None:
    world = TimedWorld(slots=1)
    world.serve(1)
    world.send(2)
    assert not world.send(3, within_ns=2 * STEP_NS)
    assert world.send(4, within_ns=2 * STEP_NS, attempt=1)


def test_possible_early_stop_does_not_reject_request() -> None:
    world = TimedWorld(slots=4)
    world.serve(1)
    world.send(2)
    world.admit(3, PROMPT, max_tokens=100, deadline_ns=world.now + 8 * STEP_NS)
    assert 3 not in world.failed and num_certain_outputs(world.state.live[3]) == 1
    world.admit(4, PROMPT, max_tokens=100, min_tokens=50, deadline_ns=world.now + 8 * STEP_NS)
    assert 4 in world.failed


def test_throughput_is_measured_by_step_kind() -> None:
    pace = Throughput()
    now = 0
    for _ in range(50):
        now += 10 * MS
        pace.note_step(4, 4, now - 5 * MS, now)
        now += 110 * MS
        pace.note_step(5, 105, now - 115 * MS, now)
    assert pace.decode_ns.value == pytest.approx(10 * MS, rel=0.5)  # planned half a step earlier
    assert pace.token_ns.value == pytest.approx(1 * MS, rel=0.1)


def test_pause_of_process_is_not_measured() -> None:
    pace = Throughput()
    for step in range(40):
        pace.note_step(4, 4, step * 10 * MS, (step + 1) * 10 * MS)
    pace.note_step(4, 4, 400 * MS, 60_000 * MS)
    assert pace.step_ns.value < 15 * MS
