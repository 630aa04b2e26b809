"""The choice of an engine: a function of what is known of them, and of nothing else."""

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
def test_the_choice_depends_on_nothing_else(policy: Routing) -> None:
    """Not on the order in which engines are named, nor on what was chosen before."""
    rng = random.Random(1)
    for turn in range(200):
        engines = some_engines(rng, rng.randint(1, 6))
        choice = choose(engines, policy, turn, "s")
        assert choice.index in {engine.index for engine in engines}
        assert choose(rng.sample(engines, len(engines)), policy, turn, "s") == choice


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_equal_takes_turns(policy: Routing) -> None:
    engines = [Candidate(index) for index in (3, 5, 9)]
    chosen = Counter(choose(engines, policy, turn).index for turn in range(30))
    assert chosen == {3: 10, 5: 10, 9: 10}


def test_less_to_do_is_better_and_a_known_prompt_is_less_to_do() -> None:
    rng = random.Random(2)
    for turn in range(200):
        engines = some_engines(rng, 4)
        best = choose(engines, "load", turn).index
        least = min(engine.num_queued + RUNNING_TOKENS * engine.num_open for engine in engines)
        by_index = {engine.index: engine for engine in engines}
        assert by_index[best].num_queued + RUNNING_TOKENS * by_index[best].num_open == least
    idle, knows = Candidate(0), Candidate(1, num_queued=500, num_cached=640)
    assert choose([idle, knows], "prefix", 0).index == 1
    assert choose([idle, Candidate(1, num_queued=700, num_cached=640)], "prefix", 0).index == 0
    assert choose([idle, knows], "load", 0).index == 0


def test_equal_paces_and_ample_room_leave_the_choice_as_it_is_without() -> None:
    """To the last tie: of who has the least to do, less what it knows, the first in turn."""
    rng = random.Random(3)
    for turn in range(500):
        plain = some_engines(rng, rng.randint(1, 6))
        ample = [replace(engine, slowness=1.0, kv_free=10_000) for engine in plain]
        for policy in POLICIES:
            asked = (policy, turn, "s", rng.randrange(3000), rng.choice((0.0, 64.0)))
            assert choose(ample, *asked, num_kv_tokens=4000) == choose(plain, *asked)
        ordered = sorted(plain, key=lambda engine: engine.index)
        in_turn = ordered[turn % len(ordered) :] + ordered[: turn % len(ordered)]
        best = min(in_turn, key=lambda e: e.num_queued + RUNNING_TOKENS * e.num_open - e.num_cached)
        assert choose(ample, "prefix", turn, "", 500, 100.0, 4000).index == best.index


@pytest.mark.parametrize("policy", ["load", "prefix"])
def test_an_engine_that_takes_twice_as_long_gets_half_as_much(policy: Routing) -> None:
    queued = [0, 0, 0]
    for turn in range(3000):
        engines = [
            Candidate(index, tokens, slowness=2.0 if index == 1 else 1.0)
            for index, tokens in enumerate(queued)
        ]
        queued[choose(engines, policy, turn, "", 100).index] += 100
    assert queued[0] == pytest.approx(120_000, rel=0.01) == queued[2] and queued[1] == pytest.approx(
        60_000, rel=0.01
    )
    idle, busy = Candidate(0, slowness=4.0), Candidate(1, num_queued=1000)
    assert choose([idle, busy], policy, 0, "", 100).index == 0
    assert choose([idle, busy], policy, 0, "", 1000).index == 1, (
        "its own prompt would take longer than waiting"
    )


@pytest.mark.parametrize("absurd", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_pace_that_cannot_be_is_that_of_the_others(absurd: float) -> None:
    rng = random.Random(4)
    for turn in range(100):
        engines = some_engines(rng, 5)
        odd = [replace(engine, slowness=absurd) if at % 2 else engine for at, engine in enumerate(engines)]
        assert choose(odd, "prefix", turn, "", 500, 10.0) == choose(engines, "prefix", turn, "", 500, 10.0)


def test_however_slow_an_engine_is_said_to_be_it_is_better_than_waiting_for_ever() -> None:
    slow, busy = Candidate(0, slowness=1e300), Candidate(1, num_queued=100_000)
    assert choose([slow, busy], "load", 0, "", 100).index == 0


@pytest.mark.parametrize("policy", ["load", "prefix"])
def test_whose_memory_cannot_hold_a_request_gets_it_only_where_nobody_can(policy: Routing) -> None:
    full, busy = Candidate(0, kv_free=900), Candidate(1, num_queued=50_000, kv_free=1000)
    choice = choose([full, busy], policy, 0, "", 800, num_kv_tokens=1000)
    assert choice.index == 1 and choice.reason.endswith("1 of 2 lack KV memory")
    assert choose([full, busy], policy, 0, "", 800, num_kv_tokens=900).index == 0
    assert choose([full, busy], policy, 0, "", 800, num_kv_tokens=1001).index == 0, "who waits least"
    assert choose([full, replace(busy, kv_free=None)], policy, 0, "", 800, num_kv_tokens=1001).index == 1, (
        "perhaps"
    )
    overdrawn = replace(full, kv_free=-5000)
    assert choose([overdrawn, busy], policy, 0, "", 800, num_kv_tokens=10).index == 1


def test_where_memory_is_full_a_prompt_waits_longer_for_who_knows_it() -> None:
    """Elsewhere it would drive out as much, which somebody has computed again."""
    for is_full, longest in ((False, 640), (True, 960)):
        idle = Candidate(1, is_full=is_full)
        for num_queued, best in ((longest - 10, 0), (longest + 10, 1)):
            knows = Candidate(0, num_queued=num_queued, num_cached=640, is_full=is_full)
            assert choose([knows, idle], "prefix", 0, "", 656).index == best
            assert choose([knows, idle], "load", 0, "", 656).index == 1
    roomy = Candidate(1)
    assert choose([Candidate(0, is_full=True), roomy], "prefix", 0, "", 656).index == 1, (
        "nothing is driven out there"
    )


def test_what_an_engine_has_of_a_prompt_takes_no_more_of_its_memory() -> None:
    knows, idle = Candidate(0, num_cached=640, kv_free=400), Candidate(1, kv_free=10_000)
    assert choose([knows, idle], "prefix", 0, "", 800, num_kv_tokens=1000).index == 0
    assert choose([knows, idle], "load", 0, "", 800, num_kv_tokens=1000).index == 1
    assert choose([knows, idle], "prefix", 0, "", 800, num_kv_tokens=1100).index == 1


def test_a_second_long_prompt_stands_behind_the_first_where_long_ones_are_rare() -> None:
    """Elsewhere it would block the last engine that the many short ones find idle."""
    idle, busy = Candidate(0, num_queued=64), Candidate(1, num_queued=1900)
    for policy in ("load", "prefix"):
        for turn in (0, 1):
            assert choose([idle, busy], policy, turn, "", 1900, usual=78).index == 1
            assert choose([idle, busy], policy, turn, "", 1900, usual=200).index == 0, "they are common"
            assert choose([idle, busy], policy, turn, "", 64, usual=78).index == 0
            assert choose([idle, busy, Candidate(2)], policy, turn, "", 1900, usual=78).index in (0, 2)
            assert choose([idle, Candidate(1, num_queued=5000)], policy, turn, "", 1900, usual=78).index == 0


def test_a_session_stays_and_few_move_when_an_engine_leaves() -> None:
    engines = [Candidate(index, num_queued=100 * index) for index in range(5)]
    sessions = [f"user-{number}" for number in range(400)]
    before = {name: choose(engines, "session", turn, name).index for turn, name in enumerate(sessions)}
    assert min(Counter(before.values()).values()) > 40
    left = [engine for engine in engines if engine.index != 2]
    after = {name: choose(left, "session", 7 * turn, name).index for turn, name in enumerate(sessions)}
    assert all(after[name] == before[name] for name in sessions if before[name] != 2)


def test_a_vector_counts_as_the_token_that_it_is() -> None:
    """However many bytes it has."""
    first, second = (b"".join(bytes([at % 251]) * 96 + bytes(4) for at in range(200)) for _ in range(2))
    marked = bytearray(second)
    marked[130 * 100 + 99] = 7
    names, others = (hash_prefixes(EmbedsPrompt("F32", 25, bytes(values))) for values in (first, marked))
    assert len(names) == len(others) == 200 // PIECE_TOKENS
    assert names[:2] == others[:2] and names[2] != others[2]
    assert hash_prefixes(EmbedsPrompt("BF16", 3, bytes(6 * 200))) == [], "no whole number of four bytes"


def test_beginnings_have_the_same_names_as_far_as_they_are_the_same() -> None:
    a, b = b"x" * (3 * PIECE_BYTES + 5), b"x" * (2 * PIECE_BYTES) + b"y" * PIECE_BYTES
    names, others = (hash_prefixes(TextPrompt(text.decode())) for text in (a, b))
    assert len(names) == len(others) == 3 and names[:2] == others[:2] and names[2] != others[2]
    assert len(set(names)) == 3
    assert not set(names) & set(hash_prefixes(TextPrompt(a.decode()), "salt"))
    assert hash_prefixes(TextPrompt("short")) == []
    assert len(hash_prefixes(TokenPrompt(pack_i32([1] * 200_000)))) == MAX_PIECES
    turns = [
        b'[{"role":"user","content":"' + b"q" * 600,
        b'[{"role":"user","content":"' + b"q" * 600 + b'"},{"role"',
    ]
    first, second = (hash_prefixes(ChatPrompt(turn, tools=b"[]")) for turn in turns)
    assert first and second[: len(first)] == first


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    table = PrefixAffinity(max_hashes=4)
    table.note([1, 2])
    table.note([5, 6])
    table.note([1, 2])
    table.note([7])
    assert [table.find(names)[0] for names in ([1, 2], [5, 6], [7])] == [
        2,
        1,
        1,
    ]  # the end goes before the beginning
    table.clear()
    assert table.find([1])[0] == 0


def test_who_misses_something_has_lost_all_that_was_not_used_since() -> None:
    table = PrefixAffinity()
    for names in ([1, 2, 3], [4, 5], [6]):
        table.note(names)
    _, used = table.find([4, 5])
    table.note([6, 7])
    table.miss(used)
    assert [table.find(names)[0] for names in ([1], [4], [6, 7])] == [0, 0, 2]
