"""Prefix cache: hits, misses and LRU eviction."""

from __future__ import annotations

import time

import pytest

from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import extend_chain, reach, salt_digest
from quintet.wire.embeds import EmbedsSpan
from tests.core.fake import World
from tests.core.fake_model import expected

PROMPT = list(range(10, 30))  # 5 blocks of 4


def cached(world: World, request_id: int, prompt: list[int], **options: object) -> int | None:
    """Run one request; return how many of its prompt tokens were cached."""
    world.admit(request_id, prompt, max_tokens=2, ignore_eos=True, **options)
    world.run()
    outcome = world.outcomes[request_id]
    assert outcome.tokens == expected(prompt, request_id, 2, stops=())
    return outcome.num_cached


def test_one_token_is_always_left_to_compute() -> None:
    world = World()
    assert cached(world, 1, PROMPT) == 0
    assert cached(world, 2, PROMPT) == 16
    assert cached(world, 3, [*PROMPT, 99]) == 20
    assert cached(world, 4, [*PROMPT[:10], 99, *PROMPT[11:]]) == 8


def test_outputs_are_cached() -> None:
    world = World()
    outputs = expected(PROMPT, 1, 2, stops=())
    longer = expected(PROMPT, 1, 9, stops=())
    world.admit(1, PROMPT, max_tokens=9, ignore_eos=True)
    world.run()
    assert longer[:2] == outputs
    assert cached(world, 2, PROMPT + longer) == 28


def test_salts_do_not_share() -> None:
    world = World()
    assert cached(world, 1, PROMPT, cache_salt="a") == 0
    assert cached(world, 2, PROMPT, cache_salt="b") == 0
    assert cached(world, 3, PROMPT) == 0
    assert cached(world, 4, PROMPT, cache_salt="a") == 16


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_requests_without_cache_reads(options: dict[str, object]) -> None:
    world = World()
    cached(world, 1, PROMPT)
    assert cached(world, 2, PROMPT, **options) == 0


def test_disabled() -> None:
    world = World(prefix_caching=False)
    cached(world, 1, PROMPT)
    assert cached(world, 2, PROMPT) == 0
    assert world.engine.state is not None and not world.engine.state.pool.cached


def test_running_requests_share_committed_blocks() -> None:
    world = World(num_blocks=8, max_steps_in_flight=1)
    world.admit(1, PROMPT, max_tokens=9, ignore_eos=True)
    world.step()
    world.admit(2, PROMPT, max_tokens=1, ignore_eos=True)
    world.step()
    assert world.outcomes[2].num_cached == 16
    world.run()
    world.assert_idle()


def test_counts_queries_and_hits_in_tokens() -> None:
    world = World()
    cached(world, 1, PROMPT)
    cached(world, 2, PROMPT)
    assert world.engine.state is not None
    counters = world.engine.state.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (40, 16)


def test_lru_eviction_tails_before_heads() -> None:
    world = World(num_blocks=12, max_steps_in_flight=1)
    other = [99, *PROMPT[1:]]
    cached(world, 1, PROMPT)
    cached(world, 2, other)
    cached(world, 3, [*PROMPT, 98])  # the other prefix is now the older one
    assert world.engine.state is not None
    pool, groups = world.engine.state.pool, world.engine.state.limits.groups
    assert (len(pool.cached), len(pool.free)) == (10, 2)
    for _ in range(2 + 3):  # the free blocks, then the three oldest
        pool.take()
    keys = [extended(prompt) for prompt in (PROMPT, other)]
    assert [reach(pool.index.block_of, chain, 5, groups) for chain in keys] == [5, 2]


def extended(prompt: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, salt_digest(""), prompt, 4, len(prompt) // 4)
    return chain


def test_key_depends_on_everything_before() -> None:
    same_block = extended([1, 2, 3, 4, 9, 9, 9, 9])[1]
    assert same_block != extended([1, 2, 3, 5, 9, 9, 9, 9])[1]
    assert same_block != extended([9, 9, 9, 9])[0]
    assert salt_digest("") != salt_digest("\0")


def test_a_span_changes_the_keys_from_its_first_block_on() -> None:
    prompt = [0] * 16

    def with_span(start: int, num_tokens: int, content: bytes) -> list[bytes]:
        span = EmbedsSpan(start, "F16", 1, bytes(2 * num_tokens), content.ljust(32))
        chain: list[bytes] = []
        extend_chain(chain, salt_digest(""), prompt, 4, 4, [span])
        return chain

    chains = [extended(prompt), with_span(6, 4, b"a"), with_span(6, 4, b"b"), with_span(7, 4, b"a")]
    assert len({chain[0] for chain in chains}) == 1
    for position in range(1, 4):
        assert len({chain[position] for chain in chains}) == len(chains)
    assert chains[1] == with_span(6, 4, b"a")


def test_same_content_twice_is_registered_once() -> None:
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    pool.index.register(b"key", first)
    pool.index.register(b"key", second)
    pool.release([first, second], None)
    assert list(pool.cached) == [first] and second in pool.free


def test_fenced_block_is_readable_but_not_reusable() -> None:
    pool = BlockPool(2)
    known, unknown = pool.take(), pool.take()
    pool.index.register(b"key", known)
    pool.release([known, unknown], fence=7)
    assert pool.num_available == 0
    pool.share([pool.index.block_of[b"key"]])
    assert pool.refs[known] == 1
    pool.settle(6)
    assert pool.num_available == 0
    pool.settle(7)
    assert pool.free == [unknown]
    pool.release([known], None)
    assert pool.num_available == 2


def test_time_of_a_block_does_not_depend_on_the_number_of_blocks() -> None:
    """The same number of blocks in 40 pools and in one. Searches for the oldest block take twenty times as long."""
    seconds: list[tuple[float, float]] = []
    for num_pools in (40, 1):
        num_blocks = 40_000 // num_pools
        pools = [BlockPool(num_blocks) for _ in range(num_pools)]
        for pool in pools:
            for block in [pool.take() for _ in range(num_blocks)]:
                pool.index.register(block.to_bytes(4, "little"), block)
                pool.release([block], fence=1)
        began_s = time.process_time()
        for pool in pools:
            pool.settle(1)
        settled_s = time.process_time()
        for pool in pools:
            for _ in range(num_blocks):
                pool.take()
        seconds.append((settled_s - began_s, time.process_time() - settled_s))
    assert all(one < 3 * many + 0.1 for many, one in zip(*seconds, strict=True)), seconds
