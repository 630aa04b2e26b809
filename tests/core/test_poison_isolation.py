"""Poison isolation: requests that fail the executor are found and rejected; others are unaffected."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import msgspec
import pytest

from quintet.core.hooks import FEATURES, Feature, Setup
from quintet.core.poison_isolation import DEATHS_ALONE, MAX_REJECTIONS, REJECTION_TTL_S, Rejections
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState
from quintet.wire import codec
from quintet.wire.config import SpeculativeConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Admit, FinishReason
from quintet.wire.params import SamplingParams, seed_of_choice
from quintet.wire.request import RequestSpec
from quintet.wire.step import NewRow

from .fake import ExecutorFails, Fault, World, no_fault
from .fake_model import expected
from .trace import assert_served, random_trace

NUM_SUSPECTS = 64
MAX_TOKENS = 12


def prompt_of(request_id: int) -> list[int]:
    return [10 + request_id, 20, 30, 40]


def fails_at(output: int, dies: bool, *guilty: int) -> Fault:
    """Return a fault that fails when a guilty request computes the token after ``output`` outputs."""

    def fault(rows: list[tuple[NewRow, int, int]]) -> None:
        for row, start, count in rows:
            if row.request_id in guilty and start <= row.num_prompt_tokens + output < start + count:
                raise ExecutorFails(dies=dies)

    return fault


def crowd(fault: Fault = no_fault, size: int = NUM_SUSPECTS, **options: object) -> World:
    """Make a world in which every step computes all requests of a crowd."""
    settings: dict[str, object] = {"num_blocks": 16 * size, "slots": size, "max_num_batched_tokens": 8 * size}
    world = World(fault=fault, **(settings | options))  # type: ignore[arg-type]
    for request_id in range(1, size + 1):
        world.admit(request_id, prompt_of(request_id), max_tokens=MAX_TOKENS, ignore_eos=True)
    return world


def assert_alone(world: World, request_ids: list[int]) -> None:
    """Check that these requests ended with the outputs that they have alone."""
    for request_id in request_ids:
        outcome = world.outcomes[request_id]
        assert outcome.tokens == expected(prompt_of(request_id), request_id, MAX_TOKENS, stops=()), request_id
        assert (outcome.finish, outcome.num_endings) == (FinishReason.LENGTH, 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_trace_with_poison(seed: int, depth: int) -> None:
    assert_served(*random_trace(seed, 200, depth, poisonous=0.2))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("guilty", [1, 21, 32, 33, 64])
def test_poison_is_found_by_bisection(guilty: int, dies: bool, depth: int) -> None:
    world = crowd(fails_at(3, dies, guilty), max_steps_in_flight=depth)
    world.run()
    assert list(world.failed) == [guilty] and world.codes[guilty] is ErrorCode.UNPROCESSABLE
    assert_alone(world, [r for r in range(1, NUM_SUSPECTS + 1) if r != guilty])
    assert world.num_losses <= log2(NUM_SUSPECTS) + (DEATHS_ALONE if dies else 1)
    world.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("output", range(2, 11))
def test_poison_among_accepted_drafts_is_found(output: int, depth: int) -> None:
    """The end of a lost step is known only up to its drafts; a suspect must not be cleared before it."""
    drafts = SpeculativeConfig(num_speculative_tokens=8)
    world = crowd(fails_at(output, True, 3), size=4, max_steps_in_flight=depth, speculative=drafts)
    world.run()
    assert list(world.failed) == [3]
    assert_alone(world, [1, 2, 4])
    assert world.num_losses <= 2 + DEATHS_ALONE


@pytest.mark.parametrize("dies", [False, True])
def test_several_poison_requests_are_found(dies: bool) -> None:
    guilty = [3, 4, 40, 64]
    world = crowd(fails_at(3, dies, *guilty))
    world.run()
    assert sorted(world.failed) == guilty
    assert_alone(world, [r for r in range(1, NUM_SUSPECTS + 1) if r not in guilty])
    assert world.num_losses <= len(guilty) * (log2(NUM_SUSPECTS) + (DEATHS_ALONE if dies else 1))


def test_error_contains_the_exception() -> None:
    world = crowd(fails_at(0, False, 2), size=3)
    world.run()
    assert "ValueError: poison" in world.failed[2] and f"{REJECTION_TTL_S} s" in world.failed[2]


def test_poison_that_ran_alone_needs_no_trial() -> None:
    world = crowd(fails_at(3, False, 1), size=1)
    world.run()
    assert world.num_losses == 1 and list(world.failed) == [1]


def test_one_kill_costs_one_recomputation() -> None:
    world = crowd()
    for _ in range(4):
        world.step()
    world.new_executor()
    computed_before = len(world.plans)
    world.run()
    assert not world.failed
    assert_alone(world, list(range(1, NUM_SUSPECTS + 1)))
    computed = tokens_computed(world, computed_before)
    # All known tokens (prompt and outputs) once, then each remaining output. The second half takes two steps more;
    # the first half recomputes its last full block after the cached ones.
    known = 4 + 4
    most = NUM_SUSPECTS * (known + (MAX_TOKENS - 4) + world.block_size)
    assert computed <= most


def tokens_computed(world: World, first_plan: int) -> int:
    """Return how many tokens the plans from ``first_plan`` on compute."""
    plans = [msgspec.msgpack.decode(plan) for plan in world.plans[first_plan:]]
    return sum(sum(codec.unpack_i32(plan[9])) for plan in plans)


def test_repeated_kills_reject_no_progressing_request() -> None:
    world = crowd(size=1)
    for _ in range(4):
        for _ in range(DEATHS_ALONE - 1):
            world.plan()
            world.new_executor()  # with the request alone in flight
        while world.engine.suspects.trial is not None:
            world.step()
    world.run()
    assert not world.failed
    assert_alone(world, [1])


def test_kill_without_steps_in_flight_suspects_no_request() -> None:
    world = crowd(size=4, max_steps_in_flight=1)
    world.step()
    world.new_executor()
    assert world.engine.suspects.trial is None


def test_trial_admits_no_request_and_ends() -> None:
    world = crowd(size=4)
    world.step()
    world.new_executor()
    assert world.engine.state is not None and world.engine.state.trial == {1, 2}
    world.admit(9, prompt_of(9), max_tokens=MAX_TOKENS, ignore_eos=True)
    world.plan()
    assert [r.request_id for r in world.engine.state.running] == [1, 2]
    world.run()
    assert_alone(world, [1, 2, 3, 4, 9])


def test_steps_of_earlier_trial_are_not_attributed_to_next() -> None:
    """The second half starts once nothing of the first is in flight; a death is then attributed to the second."""
    world = crowd(size=4, max_steps_in_flight=3)
    world.step()
    world.new_executor()
    state = world.engine.state
    assert state is not None
    first = state.trial
    while state.trial == first:
        world.step()
    assert state.trial == {3, 4}
    assert all({r.request_id for r in flight.rows} <= {3, 4} for flight in state.in_flight)


def stop_hit(world: World, *request_ids: int) -> None:
    world.engine.stop_hit(request_ids, [0] * len(request_ids), world.tick())


@pytest.mark.parametrize("leave", [World.cancel, stop_hit])
def test_suspects_may_end_during_their_trial(leave: Callable[..., None]) -> None:
    world = crowd(fails_at(3, True, 2), size=8)
    while world.engine.suspects.trial is None:
        world.step()
    leave(world, 1, 2, 3, 4, 8)
    world.run()
    assert not world.failed and world.num_losses == 1
    assert_alone(world, [5, 6, 7])
    world.assert_idle()


def test_innocent_request_is_not_rejected_after_guilty_one_ends() -> None:
    """Two requests are in the failing step; the guilty one is cancelled before the core receives the failure."""
    world = crowd(fails_at(3, False, 1), size=2, max_steps_in_flight=1)
    while world.failure is None:
        world.step()
        world.plan()
    world.cancel(1)
    world.run()
    assert not world.failed
    assert_alone(world, [2])


def test_rejection_ends_every_choice() -> None:
    world = World(fault=fails_at(2, False, 3), slots=16)
    world.admit(1, prompt_of(1), n=4, max_tokens=3 * MAX_TOKENS, ignore_eos=True)
    world.admit(10, prompt_of(10), max_tokens=MAX_TOKENS, ignore_eos=True)
    world.run()
    assert sorted(world.failed) == [1, 2, 3, 4]
    assert world.engine.state is not None and world.engine.state.counters.poison_requests == 1
    assert_alone(world, [10])
    world.assert_idle()


def test_choices_are_tried_without_first_choice() -> None:
    """Choices wait for the first one's prefill; on trial without it, each computes the prompt itself."""
    world = World(slots=16, num_blocks=128)
    world.admit(1, prompt_of(1), n=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    while not world.engine.state or len(world.engine.state.running) < 4:
        world.step()
    world.plan()
    world.new_executor()
    world.run()
    assert not world.failed
    for choice in range(4):
        wanted = expected(prompt_of(1), seed_of_choice(1, choice), MAX_TOKENS, stops=())
        assert world.outcomes[1 + choice].tokens == wanted


def test_identical_requests_end_together() -> None:
    same = [5, 6, 7, 8, 9, 10]

    def fault(rows: list[tuple[NewRow, int, int]]) -> None:
        if any(codec.unpack_i32(row.token_ids)[0] == 199 for row, _, _ in rows):
            raise ExecutorFails(dies=False)

    world = World(fault=fault, slots=16)
    for request_id in range(1, 11):
        prompt = [199, 3, 4] if request_id in same else prompt_of(request_id)
        world.admit(request_id, prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
    world.run()
    assert sorted(world.failed) == same
    assert_alone(world, [1, 2, 3, 4])
    assert world.num_losses <= ceil(log2(10)) + 1


def test_rejected_poison_is_refused_until_expiry() -> None:
    world = crowd(fails_at(0, False, 1), size=1)
    world.run()
    num_plans = len(world.plans)
    world.admit(2, prompt_of(1), max_tokens=MAX_TOKENS, ignore_eos=True, seed=77, n=3)
    assert world.codes[2] is ErrorCode.UNPROCESSABLE and f"in {REJECTION_TTL_S} s" in world.failed[2]
    world.run()
    assert len(world.plans) == num_plans
    world.admit(5, prompt_of(1), max_tokens=MAX_TOKENS + 1, ignore_eos=True)
    world.admit(6, prompt_of(6), max_tokens=MAX_TOKENS, ignore_eos=True)
    world.now += REJECTION_TTL_S * 1_000_000_000
    world.admit(7, prompt_of(1), max_tokens=MAX_TOKENS, ignore_eos=True)
    world.run()
    assert sorted(world.failed) == [1, 2]
    assert len(world.outcomes[5].tokens) == MAX_TOKENS + 1 and len(world.outcomes[7].tokens) == MAX_TOKENS


def test_number_of_remembered_rejections_is_bounded() -> None:
    refusals = Rejections()
    for number in range(MAX_REJECTIONS + 5):
        refusals.add(number.to_bytes(8, "little"), "it broke", 0)
    assert len(refusals.entries) == MAX_REJECTIONS
    admit = Admit(1, codec.pack_i32([1]), RequestSpec(SamplingParams(), 0, 0), 0)
    assert refusals.answer_to(admit, 0) is None


def test_newer_attempt_of_rejected_request_is_refused() -> None:
    """The frontend replaced a detokenizer and resent the request before it received the rejection."""
    world = crowd(fails_at(3, False, 1), size=2)
    world.run()
    num_plans = len(world.plans)
    world.resend(1, 2)
    assert not world.engine.num_live and len(world.plans) == num_plans


def test_newer_attempt_of_suspect_stays_on_trial() -> None:
    world = crowd(fails_at(6, False, 1), size=4)
    while world.engine.suspects.trial is None:
        world.step()
    world.resend(1, 3, params=SamplingParams(max_tokens=MAX_TOKENS, seed=1, ignore_eos=True, logprobs=1))
    world.run()
    assert list(world.failed) == [1]
    assert_alone(world, [2, 3, 4])


def test_failure_of_a_replaced_executor_changes_nothing() -> None:
    world = crowd(fails_at(0, False, 1), size=4)
    old = world.executor.capacity
    while world.engine.suspects.trial is None:
        world.step()
    trial = world.engine.suspects.trial
    world.apply(world.engine.capacity(old, world.tick()))
    assert world.engine.suspects.trial == trial
    world.run()
    assert list(world.failed) == [1]


def build(setup: Setup) -> Feature:
    """Build a feature that schedules request 3 only together with request 4."""
    return Feature("pairs", can_schedule=gate)


def gate(state: SchedulerState, request: Request) -> bool:
    """Hold back request 3 while request 4 does not run: a trial of request 3 alone cannot start."""
    return request.request_id != 3 or any(other.request_id == 4 for other in state.running)


def test_trial_that_cannot_start_is_cancelled() -> None:
    world = World(features=FEATURES | {"pairs": __name__})
    for request_id in (3, 4):
        world.admit(request_id, prompt_of(request_id), max_tokens=MAX_TOKENS, ignore_eos=True)
    while not world.engine.state or len(world.engine.state.running) < 2:
        world.step()
    world.plan()
    world.new_executor()
    world.run()
    assert_alone(world, [3, 4])
