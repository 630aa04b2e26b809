"""KV of peer servers, in the core: offered blocks are fetched, missing ones are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from quintet.core import recurrent_state
from quintet.core.kv.tier import Source, Wanted
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.kv_spec import KvGroup
from quintet.wire.request import KvTransfer
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.kv.fake_back_ends import PEER, FakeDisk, FakePeers

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and a token to compute."""
OFFERS = KvTransfer(offers=True)


def state_of(world: World) -> SchedulerState:
    assert world.engine.state is not None
    return world.engine.state


def compute(world: World, request_id: int = 1, prompt: list[int] | None = None) -> None:
    """Act as the server that runs prefill; then start an empty core."""
    world.admit(request_id, prompt or PROMPT, max_tokens=1, ignore_eos=True, kv_transfer=OFFERS)
    world.run()
    assert world.plan() is None, "only tier requests are left"
    world.new_core()


def admit(world: World, request_id: int, num_blocks: int = 5, prompt: list[int] | None = None) -> None:
    kv_transfer = KvTransfer(peer=PEER, num_blocks=num_blocks)
    world.admit(request_id, prompt or PROMPT, max_tokens=5, ignore_eos=True, kv_transfer=kv_transfer)


def decode(world: World, request_id: int = 2, num_blocks: int = 5, prompt: list[int] | None = None) -> int:
    """Act as the server that decodes; return how many of the prompt's tokens were cached."""
    admit(world, request_id, num_blocks, prompt)
    world.run()
    outcome = world.outcomes[request_id]
    assert outcome.tokens == expected(prompt or PROMPT, request_id, 5, stops=())
    world.assert_idle()
    assert outcome.num_cached is not None
    return outcome.num_cached


def test_only_requests_with_transfer_params_offer_or_fetch() -> None:
    peers = FakePeers()
    world = World(peers=peers)
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.run()
    assert not peers.offered
    compute(world, 2)
    assert len(peers.offered) == 5
    world.admit(3, PROMPT, max_tokens=5, ignore_eos=True)
    world.run()
    assert world.outcomes[3].num_cached == 0


def test_windows_are_transferred() -> None:
    groups = [KvGroup("full", [0]), KvGroup("sliding", [1], 8)]
    world = World(peers=FakePeers(20), groups=groups)
    compute(world)
    assert decode(world) == 20


@pytest.mark.parametrize("block_size", [4, 32])
def test_states_are_transferred(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States after full blocks: near the prompt's end for small blocks, at intervals for large ones."""
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 64)
    groups = [KvGroup("full", [0]), KvGroup("state", [1])]
    world = World(peers=FakePeers(60), groups=groups, block_size=block_size, max_model_len=256)
    prompt = [number % 150 + 10 for number in range(117)]
    compute(world, prompt=prompt)
    assert decode(world, prompt=prompt, num_blocks=100) == (116 if block_size == 4 else 64)


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_fetch_is_limited_to_offered_blocks(num_blocks: int) -> None:
    world = World(peers=FakePeers())
    compute(world)
    assert decode(world, num_blocks=num_blocks) == 4 * num_blocks


def test_head_of_a_partial_fetch_is_used() -> None:
    peers = FakePeers()
    world = World(peers=peers)
    compute(world)
    del peers.offered[[*peers.offered][2]]
    assert decode(world) == 8


def test_request_waits_for_staging_blocks() -> None:
    peers = FakePeers(num_staging_blocks=5)
    world = World(peers=peers)
    other = list(range(50, 71))
    compute(world)
    compute(world, 2, other)
    admit(world, 3)
    admit(world, 4, prompt=other)
    world.run()
    assert [world.outcomes[request_id].num_cached for request_id in (3, 4)] == [20, 20]


def test_small_fetch_does_not_overtake_large_one() -> None:
    peers = FakePeers(num_staging_blocks=5)
    world = World(peers=peers)
    prompts = {11: list(range(50, 63)), 12: PROMPT, 13: list(range(70, 79))}
    for request_id, prompt in prompts.items():
        compute(world, request_id - 10, prompt)
    for request_id, prompt in prompts.items():
        admit(world, request_id, prompt=prompt)
    world.plan()
    (tier,) = state_of(world).pool.tiers.remote
    assert [*tier.fetches.requests] == [11]
    world.run()
    assert [world.outcomes[request_id].num_cached for request_id in prompts] == [12, 20, 8]
    world.assert_idle()


def test_refused_request_is_not_looked_up_in_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(peers=FakePeers(num_staging_blocks=5))
    prompts = {11: list(range(50, 63)), 12: PROMPT, 13: list(range(70, 79))}
    for request_id, prompt in prompts.items():
        compute(world, request_id - 10, prompt)
    (tier,), looked_up = state_of(world).pool.tiers.remote, list[int]()
    look_up = tier.look_up

    def count(wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None) -> Mapping[bytes, Source]:
        looked_up.append(wanted.request_id)
        return look_up(wanted, digests, computing_ns)

    monkeypatch.setattr(tier, "look_up", count)
    for request_id, prompt in prompts.items():
        admit(world, request_id, prompt=prompt)
    for _ in range(3):
        world.plan()
    assert looked_up == [11, 12, 13]
    world.run()
    assert [world.outcomes[request_id].num_cached for request_id in prompts] == [12, 20, 8]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_ended_request_leaves_staging_queue(is_cancelled: bool) -> None:
    peers = FakePeers(num_staging_blocks=5)
    world = World(peers=peers)
    prompts = {11: list(range(50, 63)), 12: PROMPT, 13: list(range(70, 79))}
    for request_id, prompt in prompts.items():
        compute(world, request_id - 10, prompt)
    for request_id, prompt in prompts.items():
        admit(world, request_id, prompt=prompt)
    world.plan()
    if is_cancelled:
        world.cancel(12)
    else:
        world.new_executor()
    world.run()
    assert world.outcomes[13].num_cached == 8
    world.assert_idle()


def test_disk_serves_blocks_missing_at_peers() -> None:
    peers = FakePeers()
    world = World(peers=peers, disk=FakeDisk(20))
    compute(world)
    peers.is_losing = True
    assert decode(world) == 20
    counters = state_of(world).counters
    assert (counters.transfers["peer", "missed_blocks"], counters.transfers["disk", "fetched_blocks"]) == (
        5,
        5,
    )
