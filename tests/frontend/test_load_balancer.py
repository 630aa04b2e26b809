"""Load balancing: the choice of an engine is a pure function of the known state."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from quintet.frontend.load_balancing.load_balancer import RUNNING_TOKENS, Candidate, choose
from quintet.frontend.load_balancing.prefix_affinity import (
    MAX_PIECES,
    PIECE_BYTES,
    PIECE_TOKENS,
    PrefixAffinity,
    hash_prefixes,
)
from quintet.wire.chat import encode_messages
from quintet.wire.codec import pack_i32
from quintet.wire.config import Routing
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import ChatPrompt, TextPrompt, TokenPrompt

POLICIES: tuple[Routing, ...] = ("round-robin", "load", "prefix", "session")


def some_engines(rng: random.Random, count: int) -> list[Candidate]:
    return [
        Candidate(index, rng.randrange(1000), rng.randrange(8), rng.choice([0, 0, 64, 640]))
        for index in rng.sample(range(100), count)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_choice_depends_on_known_state_only(policy: Routing) -> None:
    """Independent of the order of engines and of previous choices."""
    rng = random.Random(1)
    for rotation in range(200):
        engines = some_engines(rng, rng.randint(1, 6))
        choice = choose(engines, policy, rotation, "s")
        assert choice.index in {engine.index for engine in engines}
        assert choose(rng.sample(engines, len(engines)), policy, rotation, "s") == choice


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_engines_are_chosen_in_rotation(policy: Routing) -> None:
    engines = [Candidate(index) for index in (3, 5, 9)]
    chosen = Counter(choose(engines, policy, rotation).index for rotation in range(30))
    assert chosen == {3: 10, 5: 10, 9: 10}


def test_least_work_counts_cached_prompts() -> None:
    rng = random.Random(2)
    for rotation in range(200):
        engines = some_engines(rng, 4)
        best = choose(engines, "load", rotation).index
        least = min(engine.num_queued + RUNNING_TOKENS * engine.num_open for engine in engines)
        by_index = {engine.index: engine for engine in engines}
        assert by_index[best].num_queued + RUNNING_TOKENS * by_index[best].num_open == least
    idle, has_prompt = Candidate(0), Candidate(1, num_queued=500, num_cached=640)
    assert choose([idle, has_prompt], "prefix", 0).index == 1
    assert choose([idle, Candidate(1, num_queued=700, num_cached=640)], "prefix", 0).index == 0
    assert choose([idle, has_prompt], "load", 0).index == 0


def test_equal_speeds_and_free_memory_change_no_choice() -> None:
    """Including ties: of the engines with the least remaining work, the first in rotation."""
    rng = random.Random(3)
    for rotation in range(500):
        plain = some_engines(rng, rng.randint(1, 6))
        ample = [replace(engine, slowness=1.0, kv_free=10_000) for engine in plain]
        for policy in POLICIES:
            request = (policy, rotation, "s", rng.randrange(3000), rng.choice((0.0, 64.0)))
            assert choose(ample, *request, num_kv_tokens=4000) == choose(plain, *request)
        ordered = sorted(plain, key=lambda engine: engine.index)
        in_rotation = ordered[rotation % len(ordered) :] + ordered[: rotation % len(ordered)]
        best = min(in_rotation, key=lambda e: e.num_queued + RUNNING_TOKENS * e.num_open - e.num_cached)
        assert choose(ample, "prefix", rotation, "", 500, 100.0, 4000).index == best.index


@pytest.mark.parametrize("policy", ["load", "prefix"])
def test_half_as_fast_engine_gets_half_the_requests(policy: Routing) -> None:
    queued = [0, 0, 0]
    for rotation in range(3000):
        engines = [
            Candidate(index, tokens, slowness=2.0 if index == 1 else 1.0)
            for index, tokens in enumerate(queued)
        ]
        queued[choose(engines, policy, rotation, "", 100).index] += 100
    assert queued[0] == pytest.approx(120_000, rel=0.01) == queued[2] and queued[1] == pytest.approx(
        60_000, rel=0.01
    )
    idle, busy = Candidate(0, slowness=4.0), Candidate(1, num_queued=1000)
    assert choose([idle, busy], policy, 0, "", 100).index == 0
    assert choose([idle, busy], policy, 0, "", 1000).index == 1, "prefill there takes longer than the queue"


@pytest.mark.parametrize("invalid", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_invalid_speed_is_replaced_by_the_others(invalid: float) -> None:
    rng = random.Random(4)
    for rotation in range(100):
        engines = some_engines(rng, 5)
        odd = [replace(engine, slowness=invalid) if at % 2 else engine for at, engine in enumerate(engines)]
        assert choose(odd, "prefix", rotation, "", 500, 10.0) == choose(
            engines, "prefix", rotation, "", 500, 10.0
        )


def test_slowness_is_bounded() -> None:
    slow, busy = Candidate(0, slowness=1e300), Candidate(1, num_queued=100_000)
    assert choose([slow, busy], "load", 0, "", 100).index == 0


@pytest.mark.parametrize("policy", ["load", "prefix"])
def test_full_engine_is_chosen_only_if_all_are_full(policy: Routing) -> None:
    full, busy = Candidate(0, kv_free=900), Candidate(1, num_queued=50_000, kv_free=1000)
    choice = choose([full, busy], policy, 0, "", 800, num_kv_tokens=1000)
    assert choice.index == 1 and choice.reason.endswith("1 of 2 lack KV memory")
    assert choose([full, busy], policy, 0, "", 800, num_kv_tokens=900).index == 0
    assert choose([full, busy], policy, 0, "", 800, num_kv_tokens=1001).index == 0, "shortest queue"
    assert choose([full, replace(busy, kv_free=None)], policy, 0, "", 800, num_kv_tokens=1001).index == 1, (
        "may fit"
    )
    overdrawn = replace(full, kv_free=-5000)
    assert choose([overdrawn, busy], policy, 0, "", 800, num_kv_tokens=10).index == 1


def test_full_memory_increases_prefix_affinity() -> None:
    """Another engine would evict as much, and a request would recompute it."""
    for is_full, longest in ((False, 640), (True, 960)):
        idle = Candidate(1, is_full=is_full)
        for num_queued, best in ((longest - 10, 0), (longest + 10, 1)):
            has_prompt = Candidate(0, num_queued=num_queued, num_cached=640, is_full=is_full)
            assert choose([has_prompt, idle], "prefix", 0, "", 656).index == best
            assert choose([has_prompt, idle], "load", 0, "", 656).index == 1
    roomy = Candidate(1)
    assert choose([Candidate(0, is_full=True), roomy], "prefix", 0, "", 656).index == 1, (
        "no block is evicted there"
    )


def test_cached_prompt_tokens_need_no_memory() -> None:
    has_prompt, idle = Candidate(0, num_cached=640, kv_free=400), Candidate(1, kv_free=10_000)
    assert choose([has_prompt, idle], "prefix", 0, "", 800, num_kv_tokens=1000).index == 0
    assert choose([has_prompt, idle], "load", 0, "", 800, num_kv_tokens=1000).index == 1
    assert choose([has_prompt, idle], "prefix", 0, "", 800, num_kv_tokens=1100).index == 1


def test_rare_long_prompts_share_one_engine() -> None:
    """It would block the last engine that short requests find idle."""
    idle, busy = Candidate(0, num_queued=64), Candidate(1, num_queued=1900)
    for policy in ("load", "prefix"):
        for rotation in (0, 1):
            assert choose([idle, busy], policy, rotation, "", 1900, usual=78).index == 1
            assert choose([idle, busy], policy, rotation, "", 1900, usual=200).index == 0, (
                "long prompts are common"
            )
            assert choose([idle, busy], policy, rotation, "", 64, usual=78).index == 0
            assert choose([idle, busy, Candidate(2)], policy, rotation, "", 1900, usual=78).index in (0, 2)
            assert (
                choose([idle, Candidate(1, num_queued=5000)], policy, rotation, "", 1900, usual=78).index == 0
            )


def test_sessions_are_sticky_and_few_move() -> None:
    engines = [Candidate(index, num_queued=100 * index) for index in range(5)]
    sessions = [f"user-{number}" for number in range(400)]
    before = {
        name: choose(engines, "session", rotation, name).index for rotation, name in enumerate(sessions)
    }
    assert min(Counter(before.values()).values()) > 40
    left = [engine for engine in engines if engine.index != 2]
    after = {
        name: choose(left, "session", 7 * rotation, name).index for rotation, name in enumerate(sessions)
    }
    assert all(after[name] == before[name] for name in sessions if before[name] != 2)


def test_embedding_counts_as_one_token() -> None:
    """Independent of its size in bytes."""
    first, second = (b"".join(bytes([at % 251]) * 96 + bytes(4) for at in range(200)) for _ in range(2))
    marked = bytearray(second)
    marked[130 * 100 + 99] = 7
    names, others = (hash_prefixes(EmbedsPrompt("F32", 25, bytes(values))) for values in (first, marked))
    assert len(names) == len(others) == 200 // PIECE_TOKENS
    assert names[:2] == others[:2] and names[2] != others[2]
    assert hash_prefixes(EmbedsPrompt("BF16", 3, bytes(6 * 200))) == [], "not a multiple of four bytes"


def test_shared_prefixes_have_equal_hashes() -> None:
    a, b = b"x" * (3 * PIECE_BYTES + 5), b"x" * (2 * PIECE_BYTES) + b"y" * PIECE_BYTES
    names, others = (hash_prefixes(TextPrompt(text.decode())) for text in (a, b))
    assert len(names) == len(others) == 3 and names[:2] == others[:2] and names[2] != others[2]
    assert len(set(names)) == 3
    assert not set(names) & set(hash_prefixes(TextPrompt(a.decode()), "salt"))
    assert hash_prefixes(TextPrompt("short")) == []
    assert len(hash_prefixes(TokenPrompt(pack_i32([1] * 200_000)))) == MAX_PIECES
    question = {"role": "user", "content": "q" * 600}
    chats = [[question], [question, {"role": "assistant"}], [{"role": "user", "content": "q" * 900}]]
    first, *others = (hash_prefixes(ChatPrompt(encode_messages(chat), tools=b"[]")) for chat in chats)
    assert first and all(hashes[: len(first)] == first for hashes in others)


def test_lru_eviction_of_prefixes() -> None:
    table = PrefixAffinity(max_hashes=4)
    table.note([1, 2])
    table.note([5, 6])
    table.note([1, 2])
    table.note([7])
    assert [table.find(names)[0] for names in ([1, 2], [5, 6], [7])] == [
        2,
        1,
        1,
    ]  # the tail is evicted before the head
    table.clear()
    assert table.find([1])[0] == 0


def test_cache_miss_forgets_prefixes_not_used_since() -> None:
    table = PrefixAffinity()
    for names in ([1, 2, 3], [4, 5], [6]):
        table.note(names)
    _, used = table.find([4, 5])
    table.note([6, 7])
    table.miss(used)
    assert [table.find(names)[0] for names in ([1], [4], [6, 7])] == [0, 0, 2]
