"""Speculative decoding in the core: the outputs are those without drafts, in random traces and in fewer steps."""

from __future__ import annotations

import random

import msgspec
import pytest

from quintet.core import recurrent_state
from quintet.core.requests.deadlines import predict
from quintet.wire.config import SchedulerConfig, SpeculativeConfig
from quintet.wire.kv_spec import KvGroup
from quintet.wire.step import StepPlan

from .fake import World
from .fake_model import expected
from .trace import assert_served, random_trace


def drafts_of(world: World) -> list[bytes]:
    """Return the drafts column of each plan."""
    return [msgspec.msgpack.decode(plan, type=StepPlan).drafts for plan in world.plans]


@pytest.mark.parametrize("seed", range(80))
def test_random_trace_with_drafts_has_the_outputs_without(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 1 + seed % 9)
    monkeypatch.setattr(recurrent_state, "GRAIN", 1 + seed % 5)
    rng = random.Random(seed)
    host, poisonous, groups = 20 * (seed % 2), 0.1 * (seed % 3 == 0), seed % 4 < 2
    stages, num_drafts = 1 + (seed % 5 == 0), rng.choice([1, 3, 8])
    world, sent = random_trace(
        *(seed, 250, seed % 3 + stages, poisonous, host),
        in_groups=groups,
        stages=stages,
        num_drafts=num_drafts,
    )
    assert_served(world, sent)


def test_accepted_drafts_save_steps() -> None:
    world = World(
        speculative=SpeculativeConfig(num_speculative_tokens=8), block_size=16, max_steps_in_flight=2
    )
    world.admit(1, [5, 6, 7], max_tokens=120, ignore_eos=True)
    world.run()
    assert world.outcomes[1].tokens == expected([5, 6, 7], 1, 120, ())
    assert world.engine.state is not None
    counters = world.engine.state.counters
    assert len(world.plans) < 80 and counters.num_accepted_tokens > 40
    assert counters.generation_tokens == 120 and counters.num_draft_tokens > counters.num_accepted_tokens
    by_position = counters.num_accepted_tokens_per_pos
    assert sum(by_position) == counters.num_accepted_tokens and by_position == sorted(by_position)[::-1]
    assert by_position[0] <= counters.num_drafts and not any(by_position[8:])


def test_accepted_drafts_after_the_end_are_not_counted() -> None:
    world = World(
        speculative=SpeculativeConfig(num_speculative_tokens=8), block_size=16, max_steps_in_flight=1
    )
    num_cut = 0
    for turn in range(1, 21):
        world.admit(turn, [turn, 6, 7], max_tokens=60, ignore_eos=True)
        state = world.engine.state
        assert state is not None
        world.step()
        # The executor does not know this stop token: it would end the drafts there.
        state.live[turn].stops = {expected([turn, 6, 7], turn, 20, ())[-1]: True}
        while world.engine.num_live:
            before = state.counters.num_accepted_tokens, state.counters.generation_tokens
            world.step()
            num_accepted = state.counters.num_accepted_tokens - before[0]
            num_kept = state.counters.generation_tokens - before[1]
            num_cut += num_accepted == num_kept > 0
            assert num_accepted <= num_kept
    assert num_cut and sum(state.counters.num_accepted_tokens_per_pos) == state.counters.num_accepted_tokens


def test_forecast_counts_accepted_drafts() -> None:
    ends = []
    for speculative in (None, SpeculativeConfig(num_speculative_tokens=8)):
        world = World(speculative=speculative, block_size=16)
        for request_id in (1, 2):
            world.admit(request_id, [5, 6, 7], max_tokens=100, ignore_eos=True)
            world.run() if request_id == 1 else None
        state = world.engine.state
        assert state is not None
        forecast = predict(
            state, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), state.waiting[-1]
        )
        ends.append((forecast.end_ns - forecast.first_token_ns) / state.throughput.step_ns.value)
    assert ends[1] < 0.7 * ends[0]


def test_row_never_verifies_drafts_beyond_its_limit() -> None:
    world = World(speculative=SpeculativeConfig(num_speculative_tokens=8), max_steps_in_flight=1)
    world.admit(1, [5, 6, 7], max_tokens=2, ignore_eos=True)
    world.run()
    assert drafts_of(world) == [b"\0", b"\1"]


def test_draft_scopes_differ_by_salt() -> None:
    world = World(speculative=SpeculativeConfig(method="suffix"))
    for request_id, salt in enumerate(("", "a", "b", "a", "")):
        world.admit(1 + request_id, [5, 6, 7], max_tokens=2, cache_salt=salt)
    world.run()
    new_rows = [row for plan in world.plans for row in msgspec.msgpack.decode(plan, type=StepPlan).new_rows]
    scopes = {row.request_id: row.draft_scope for row in new_rows}
    assert scopes[1] == scopes[5] != scopes[2] == scopes[4] != scopes[3] != scopes[1]


def test_state_checkpoints_among_drafts_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later prompt that diverges within the output continues from the last checkpoint before it."""
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 16)
    groups = [KvGroup("full", [0]), KvGroup("state", [1])]
    world = World(groups=groups, speculative=SpeculativeConfig(num_speculative_tokens=8), num_blocks=128)
    world.admit(1, [5, 6, 7], max_tokens=60, ignore_eos=True)
    world.run()
    assert world.engine.state is not None and world.engine.state.counters.num_accepted_tokens > 10
    known = [5, 6, 7, *world.outcomes[1].tokens]
    for request_id, length in ((2, 40), (3, 55)):
        world.admit(request_id, [*known[:length], 9, 9], max_tokens=2)
        world.run()
        assert world.outcomes[request_id].num_cached == length // 16 * 16


@pytest.mark.parametrize("ends", ["stop token", "stop string"])
def test_state_of_an_ended_request_is_reused_only_if_it_is_exact(ends: str) -> None:
    """The step after the last token is already planned. It may verify drafts, unless a stop token precedes it."""
    groups = [KvGroup("full", [0]), KvGroup("state", [1])]
    world = World(groups=groups, speculative=SpeculativeConfig(num_speculative_tokens=8), block_size=16)
    num_reused = 0
    for turn in range(1, 21):
        prompt = [turn, 6, 7]
        stop_ids = [expected(prompt, turn, 20 + turn, ())[-1]] if ends == "stop token" else []
        world.admit(turn, prompt, max_tokens=60, stop_token_ids=stop_ids, min_tokens=5, ignore_eos=True)
        while world.engine.num_live:
            world.step()
            if not stop_ids and turn in world.outcomes and len(world.outcomes[turn].tokens) >= 20:
                world.engine.stop_hit([turn], [0], world.tick())
        world.run()
        prompt += [*world.outcomes[turn].tokens, 9, 9]
        world.admit(100 + turn, prompt, max_tokens=2, ignore_eos=True)
        world.run()
        assert world.outcomes[100 + turn].tokens == expected(prompt, 100 + turn, 2, ())
        num_reused += (world.outcomes[100 + turn].num_cached or 0) > 16
    assert num_reused > 15 or not stop_ids
