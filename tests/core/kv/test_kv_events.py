"""KV events, in the core: a subscriber to all events can reconstruct the prefix cache."""

from __future__ import annotations

import random

import pytest

from quintet.core.kv.prefix import salt_digest
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventsConfig
from quintet.wire.kv_spec import KvGroup
from tests.core.fake import World
from tests.core.kv.test_groups import SLIDING

FULL = [KvGroup("full", [0])]


def state_of(world: World) -> SchedulerState:
    assert world.engine.state is not None
    return world.engine.state


def take_events(world: World) -> list[KvEvent]:
    events = state_of(world).events
    return [] if events is None else events.take()


@pytest.mark.parametrize("groups", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", range(6))
def test_events_reconstruct_the_prefix_cache(seed: int, groups: list[KvGroup]) -> None:
    """There are few blocks, so that contents are evicted and recomputed."""
    rng = random.Random(seed)
    num_blocks, depth = rng.choice([14, 30]), rng.choice([1, 2])
    world = World(groups=groups, num_blocks=num_blocks, max_steps_in_flight=depth, events=KvEventsConfig())
    stems = [[rng.randrange(3, 200) for _ in range(24)] for _ in range(3)]
    known: set[int] = set()
    num_removed = 0
    for request_id in range(1, 30):
        prompt = [*rng.choice(stems)[: rng.randint(1, 24)], rng.randrange(3, 200)]
        world.admit(request_id, prompt, cache_salt=rng.choice(["", "", "mine"]), ignore_eos=True)
        for _ in range(rng.randint(1, 6)):
            world.step()
        if request_id == 20:
            world.new_executor()
        for event in take_events(world):
            match event:
                case AllBlocksCleared():
                    known.clear()
                case BlockRemoved():
                    known -= set(event.block_hashes)
                    num_removed += 1
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    if groups is FULL:
                        assert event.parent_block_hash is None or event.parent_block_hash in known
                    known |= set(event.block_hashes)
        assert known == {int.from_bytes(key[-8:], "big") for key in state_of(world).pool.index.block_of}
    assert num_removed > 0


def test_salts_are_sent_as_digests() -> None:
    world = World(events=KvEventsConfig())
    for request_id, salt in ((1, ""), (2, "mine")):
        world.admit(request_id, [*range(10, 19)], cache_salt=salt, max_tokens=1)
    world.run()
    _, plain, salted = take_events(world)
    assert isinstance(plain, BlockStored) and isinstance(salted, BlockStored)
    assert plain.token_ids == salted.token_ids and plain.block_hashes != salted.block_hashes
    assert plain.extra_keys is None and salted.extra_keys == [[salt_digest("mine").hex()]] * 2


def test_spans_of_embeddings_are_sent_as_digests() -> None:
    world = World(events=KvEventsConfig())
    span = EmbedsSpan(5, "F16", 1, bytes(2 * 2), bytes(32))
    world.admit(1, [*range(10, 23)], [span], max_tokens=1)
    world.run()
    _, stored = take_events(world)
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [[], [bytes(32).hex()], []]


def test_no_events_without_configuration() -> None:
    worlds = [World(), World(events=KvEventsConfig())]
    for world in worlds:
        world.admit(1, [*range(10, 40)], max_tokens=3)
        world.run()
    assert state_of(worlds[0]).events is None and worlds[0].plans == worlds[1].plans
