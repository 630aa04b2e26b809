"""Resumable requests: retention, keys, expiry, and no token sampled twice."""

from __future__ import annotations

import pytest

from quintet.core.requests.resumption import RetainedRequests
from quintet.wire import codec
from quintet.wire.ids import RequestIds
from quintet.wire.messages import FinishReason, Resume, Resumed
from quintet.wire.request import ResumeToken

from .fake import World
from .fake_model import expected

PROMPT = list(range(10, 21))
KEY = b"k" * 16
CLAIM = ResumeToken(KEY, b"how to answer")
S = 10**9


def resume(world: World, request_id: int, key: bytes = KEY, rename_to: int = 0) -> Resumed:
    """Resume until the last tokens are sampled."""
    while True:
        query = Resume(1, 0, request_id, key, rename_to=rename_to)
        answer, effects = world.engine.resume(query, world.tick())
        world.apply(effects)
        if answer is not None:
            return answer
        assert world.commit()


def continue_as(world: World, request_id: int, former: int, seen: list[int], **options: object) -> None:
    """Continue a request under a new id, as a frontend does."""
    assert resume(world, former, rename_to=request_id).admit is not None
    world.admit(
        request_id,
        PROMPT,
        output_ids=seen,
        resumes=True,
        resume_token=CLAIM,
        ignore_eos=True,
        seed=1,
        **options,
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 20])
def test_resumed_stream_samples_no_token_twice(depth: int, num_steps: int) -> None:
    world = World(max_steps_in_flight=depth)
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    for _ in range(num_steps):
        world.step()
    while world.plan() is not None:
        pass
    world.apply(world.engine.cancel([1], world.tick(), keep=True))
    while world.commit():
        pass
    assert world.engine.num_live == 0
    world.assert_idle()
    answer = resume(world, 1)
    assert answer.admit is not None and answer.admit.spec.resume_token == CLAIM
    [(choice, outputs)] = answer.choices
    known = list(codec.unpack_i32(outputs))
    assert choice == 0 and known == expected(PROMPT, 1, 8, stops=())[: len(known)]
    seen = known[: len(known) // 2]
    continue_as(world, 50, 1, seen)
    world.run()
    assert world.outcomes[50].tokens == expected(PROMPT, 1, 8, stops=())
    assert world.outcomes[50].num_endings == 1
    assert world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 8


def test_client_resumes_a_running_request() -> None:
    world = World(max_steps_in_flight=2)
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    for _ in range(3):
        world.step()
    answer = resume(world, 1)
    assert answer.admit is not None and world.engine.num_live == 0
    assert world.outcomes[1].num_endings == 1
    continue_as(world, 50, 1, [])
    world.run()
    assert world.outcomes[50].tokens == expected(PROMPT, 1, 8, stops=())
    assert world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 8


def test_former_id_resolves_to_newest_id() -> None:
    world = World()
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    world.step()
    assert resume(world, 1).choices
    continue_as(world, 50, 1, [])
    world.step()
    assert resume(world, 1).choices  # from 50, which is live
    continue_as(world, 90, 1, [])
    world.run()
    [(_, outputs)] = resume(world, 1).choices  # from 90, which has ended
    assert list(codec.unpack_i32(outputs)) == expected(PROMPT, 1, 8, stops=())


def test_repeated_rename_changes_nothing() -> None:
    world = World()
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    world.run()
    for _ in range(2):
        [(_, outputs)] = resume(world, 1, rename_to=50).choices
        assert list(codec.unpack_i32(outputs)) == expected(PROMPT, 1, 8, stops=())


def test_resumption_needs_the_key() -> None:
    world = World()
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    world.step()
    assert resume(world, 1, b"x" * 16).admit is None
    assert world.engine.num_live == 1
    world.run()
    assert resume(world, 1, b"").admit is None
    assert resume(world, 2).admit is None
    assert resume(world, 1).admit is not None


def test_resumable_requests_of_lost_frontend_are_retained() -> None:
    world = World()
    ids = RequestIds(3, 1)
    kept, lost = ids.take(2), ids.take()
    world.admit(kept, PROMPT, n=2, seed=1, temperature=1.0, ignore_eos=True, resume_token=CLAIM)
    world.admit(lost, PROMPT, ignore_eos=True)
    for _ in range(3):
        world.step()
    world.engine.abandon(3, 1, world.tick(), down=True)
    world.run()
    world.assert_idle()
    answer = resume(world, kept)
    assert [choice for choice, _ in answer.choices] == [0, 1]
    assert resume(world, lost).admit is None


@pytest.mark.parametrize("how", ["cut off", "frontend lost"])
@pytest.mark.parametrize("loss", ["executor", "blocks"])
def test_pending_resume_ends_when_its_tokens_are_lost(how: str, loss: str) -> None:
    """A query waits for the last tokens; a loss of the executor ends it without recomputation."""
    world = World(max_steps_in_flight=2)
    request_id = RequestIds(3, 1).take()
    world.admit(request_id, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    for _ in range(2):
        world.step()
    while world.plan() is not None:
        pass
    if how == "cut off":
        world.apply(world.engine.cancel([request_id], world.tick(), keep=True))
    else:
        world.engine.abandon(3, 1, world.tick(), down=True)
    state = world.engine.state
    assert state is not None and world.engine.num_live == 1, "the query waits for the step in flight"
    if loss == "executor":
        world.new_executor()
    else:
        state.preempt(state.running[0])
        world.apply(world.engine.expire(world.tick()))
    assert world.engine.num_live == 0 and world.plan() is None
    assert world.outcomes[request_id].finish is FinishReason.ABORT
    while world.commit():
        pass
    world.engine.expire(world.tick())
    world.assert_idle()
    [(_, outputs)] = resume(world, request_id).choices
    assert list(codec.unpack_i32(outputs)) == expected(PROMPT, 1, 2, stops=())
    continue_as(world, 50, request_id, [])
    world.run()
    assert world.outcomes[50].tokens == expected(PROMPT, 1, 8, stops=())


def test_unclaimed_request_is_dropped_after_grace_period() -> None:
    world = World(resume_grace_s=5.0)
    world.admit(1, PROMPT, ignore_eos=True, resume_token=CLAIM)
    world.run()
    world.engine.expire(world.now + 4 * S)
    assert resume(world, 1).admit is not None
    world.engine.expire(world.now + 6 * S)
    assert resume(world, 1).admit is None
    assert len(world.engine.retained.kept) == 0


def test_engine_is_needed_while_requests_are_retained() -> None:
    world = World(resume_grace_s=5.0)
    world.admit(1, PROMPT, ignore_eos=True, resume_token=CLAIM)
    assert world.engine.is_needed
    world.run()
    assert len(world.engine.retained.kept) == 1 and not world.engine.is_needed, (
        "its client has received the ending"
    )
    world.admit(2, PROMPT, ignore_eos=True, resume_token=CLAIM)
    world.step()
    world.apply(world.engine.cancel([2], world.tick(), keep=True))
    world.run()
    assert world.engine.num_live == 0 and world.engine.is_needed
    world.engine.expire(world.now + 6 * S)
    assert not world.engine.is_needed


def test_cancelled_request_is_not_retained() -> None:
    world = World()
    world.admit(1, PROMPT, ignore_eos=True, resume_token=CLAIM)
    world.step()
    world.cancel(1)
    assert world.outcomes[1].finish is FinishReason.ABORT
    world.run()
    assert resume(world, 1).admit is None


def test_logprobs_are_recomputed_from_the_resume_position() -> None:
    world = World()
    world.admit(1, PROMPT, seed=1, ignore_eos=True, logprobs=1, resume_token=CLAIM)
    world.run()
    [(_, outputs)] = resume(world, 1).choices
    continue_as(world, 50, 1, list(codec.unpack_i32(outputs))[:6], logprobs=1)
    assert world.engine.num_live == 1
    world.run()
    assert world.outcomes[50].tokens == expected(PROMPT, 1, 8, stops=())


def test_retention_is_bounded() -> None:
    world = World()
    world.engine.retained = RetainedRequests(10 * S, max_bytes=5000)
    for request_id in range(1, 9):
        world.admit(request_id, PROMPT, ignore_eos=True, resume_token=CLAIM)
    world.run()
    known = [request_id for request_id in range(1, 9) if resume(world, request_id).admit is not None]
    assert 1 <= len(known) < 8 and len(known) == len(world.engine.retained.kept)


def test_all_data_of_a_retained_request_counts() -> None:
    shapes = {"answer": ResumeToken(KEY, b"a" * 10_000), "stop strings": CLAIM, "salt": CLAIM}
    options = {"answer": {}, "stop strings": {"stop": ["s" * 4000] * 3}, "salt": {"cache_salt": "s" * 10_000}}
    for what, resume_token in shapes.items():
        world = World()
        world.engine.retained = RetainedRequests(10 * S, max_bytes=10_000)
        world.admit(1, PROMPT, ignore_eos=True, resume_token=resume_token, **options[what])
        world.run()
        assert resume(world, 1).admit is None, what


def test_ended_choice_is_retained_with_the_others() -> None:
    world = World()
    world.admit(1, PROMPT, n=2, seed=1, temperature=1.0, ignore_eos=True, resume_token=CLAIM)
    world.run()
    for first in (50, 90):
        answer = resume(world, 1, rename_to=first)
        assert [(choice, len(outputs) // 4) for choice, outputs in answer.choices] == [(0, 8), (1, 8)]
        world.admit(  # the second choice was sent to its end, the first was not
            first,
            PROMPT,
            output_ids=[],
            resumes=True,
            resume_token=CLAIM,
            ignore_eos=True,
            seed=1,
            temperature=1.0,
        )
    assert world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 16


@pytest.mark.parametrize("num_steps", [0, 3])
def test_request_continued_by_another_engine_is_dropped_silently(num_steps: int) -> None:
    world = World()
    world.admit(1, PROMPT, seed=1, ignore_eos=True, resume_token=CLAIM)
    world.admit(2, PROMPT, seed=1, ignore_eos=True)
    for _ in range(num_steps):
        world.step()
    effects = world.engine.forget_moved([1, 2, 3], world.tick())
    world.apply(effects)
    assert not effects.failed and not effects.unknown
    assert all(not any(tokens.finishes) for _, tokens in effects.tokens)
    while world.commit():
        pass
    assert world.engine.num_live == 0
    assert resume(world, 1).admit is None
