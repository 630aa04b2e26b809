"""Speculative decoding in the core: the outputs are those without drafts, in random traces and in fewer steps."""

from __future__ import annotations

import random

import msgspec
import pytest

from quintet.core.requests.deadlines import predict
from quintet.wire.config import SchedulerConfig, SpeculativeConfig
from quintet.wire.kv_spec import KvGroup
from quintet.wire.step import StepPlan

from .fake import World, expected
from .trace import assert_served, random_trace


def drafts_of(world: World) -> list[bytes]:
    """Return the drafts column of each plan."""
    return [msgspec.msgpack.decode(plan, type=StepPlan).drafts for plan in world.plans]


@pytest.mark.parametrize("seed", range(60))
def test_random_trace_with_drafts_has_the_outputs_without(seed: int) -> None:
    rng = random.Random(seed)
    host, poisonous, groups = 20 * (seed % 2), 0.1 * (seed % 3 == 0), seed % 4 == 0
    world, sent = random_trace(
        seed, 250, 1 + seed % 3, poisonous, host, in_groups=groups, num_drafts=rng.choice([1, 3, 8])
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


@pytest.mark.parametrize("form", ["state", "grammar"])
def test_no_drafts_where_draws_need_a_state(form: str) -> None:
    groups = [KvGroup("full", [0]), KvGroup("state", [1])] if form == "state" else [KvGroup("full", [0])]
    world = World(groups=groups, speculative=SpeculativeConfig())
    options = {} if form == "state" else {"thinking_token_budget": 5}
    world.admit(1, [5, 6, 7], max_tokens=9, ignore_eos=True, **options)
    world.run()
    assert not any(drafts_of(world))
