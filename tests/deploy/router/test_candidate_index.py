"""The choice among many servers: the same as if all were compared, at a cost and in a memory that do not grow with them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from zlib import crc32

import pytest

from quintet.deploy.router.candidate_index import FEW
from quintet.deploy.router.metrics import parse_metrics
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import MAX_ALL_NAMES, HeldPrefixes, Server, Servers
from quintet.frontend.load_balancing.load_balancer import EVICTION_COST, RUNNING_TOKENS
from quintet.frontend.load_balancing.prefix_affinity import PIECE_TOKENS, PrefixOwners
from quintet.wire.config import Routing


class Clock:
    """Stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def servers(count: int, policy: Routing = "prefix", clock: Clock | None = None) -> Servers:
    """Return so many that are well."""
    router = Servers(policy, random.Random(0), clock=clock or Clock())
    router.set_urls([f"http://10.0.0.{index}:80" for index in range(count)], 1.0)
    for server in router:
        server.set_trouble("")
    return router


def cost(server: Server, asked: RequestSummary) -> int:
    """Return what `choose` minimizes, with nothing left out."""
    num_known, _ = server.prefixes.find(asked.names)
    load = server.num_queued + RUNNING_TOKENS * (server.num_open + server.num_others)
    return load - PIECE_TOKENS * num_known


def chained(pieces: list[int]) -> list[int]:
    """Return names of which each tells all pieces up to its own."""
    return list(accumulate(pieces, lambda name, piece: crc32(bytes(str(piece), "ascii"), name), initial=0))[
        1:
    ]


def test_nobody_who_was_left_out_would_have_been_better() -> None:
    """Prompts that share beginnings of beginnings, requests that begin, end, are sent elsewhere; servers that go and come."""
    rng, router = random.Random(1), servers(60)
    going: list[HeldPrefixes] = []
    for number in range(1200):
        own, num_own = 1000 + rng.randrange(40), rng.randint(0, 20)
        pieces = [rng.randrange(3)] * rng.randint(0, 8) + [own] * num_own
        names = chained(pieces)
        asked = RequestSummary(names, PIECE_TOKENS * len(names) + rng.randrange(64))
        without = rng.sample(list(router), rng.choice((0, 0, 1, 3)))
        left = [server for server in router.usable if server not in without]
        costs = {server: cost(server, asked) for server in left}
        held = router.choose(asked, without)
        assert held is not None and costs[held.server] == min(costs.values()), number
        going.append(held)
        if len(going) > 200 or rng.random() < 0.3:
            each = going.pop(rng.randrange(len(going)))
            each.begin()
            each.leave()
        if number % 50 == 0:
            rng.choice(list(router)).set_trouble(rng.choice(("", "is lost")))
    assert any(len(indexes) > FEW for _, indexes in router._holders.of(chained([0]))), (
        "hot beginnings were had"
    )


def test_nobody_is_left_out_either_who_is_faster_or_has_room() -> None:
    """Servers of several paces, with memory that runs short: who is chosen is the best of all that could hold the request."""
    rng, clock = random.Random(2), Clock()
    router = servers(60, clock=clock)
    for server in router:
        server.update_load(0, 0, kv_tokens=4000)
    going: list[HeldPrefixes] = []
    num_slow = num_full = 0
    for number in range(1500):
        clock.now_s += 0.01
        pieces = [rng.randrange(3)] * rng.randint(0, 8) + [1000 + rng.randrange(40)] * rng.randint(0, 20)
        names = chained(pieces)
        num_tokens = PIECE_TOKENS * len(names) + rng.randrange(1, 64)
        asked = RequestSummary(names, num_tokens, is_streamed=True)
        costs = {}
        for server in router:
            num_cached = PIECE_TOKENS * server.prefixes.find(names)[0]
            if server.kv_free is None or server.kv_free >= num_tokens - num_cached:
                slowness = server.speed.slowness(clock.now_s)
                num_new = num_tokens - num_cached
                displaced = EVICTION_COST * num_new if server.prefixes.is_full else 0
                costs[server] = slowness * (server.load + num_new) + displaced
                num_slow += slowness != 1
        num_full += len(costs) < 60
        held = router.choose(asked, ())
        assert held is not None
        going.append(held)
        assert not costs or costs[held.server] == pytest.approx(min(costs.values()), rel=1e-9), number
        if len(going) > 150:
            each = going.pop(rng.randrange(len(going)))
            each.sent_s = clock.now_s - 1e-5 * each.num_before * (1 + each.server.index % 3)
            each.answer()
            each.leave()
    assert num_slow and num_full


def test_a_server_that_is_slow_to_begin_gets_less_until_nobody_knows_that_any_more() -> None:
    clock = Clock()
    router = servers(2, "load", clock)

    def share(num: int) -> float:
        """Play requests, eight at a time; return the share of the first server, at which everything takes four times as long."""
        counts = Counter[int]()
        going: list[HeldPrefixes] = []
        for _ in range(num):
            clock.now_s += 0.1
            if len(going) == 8:
                going.pop(0).leave()
            held = router.choose(RequestSummary(num_tokens=1000, is_streamed=True), ())
            assert held is not None
            counts[held.server.index] += 1
            going.append(held)
            held.sent_s = clock.now_s - 1e-5 * held.num_before * (1 if held.server.index else 4)
            held.answer()
        for each in going:
            each.leave()
        return counts[0] / num

    assert share(64) == pytest.approx(0.5, abs=0.05), "nothing is known yet"
    share(100)
    slow, fast = router
    assert slow.speed.slowness(clock.now_s) > fast.speed.slowness(clock.now_s)
    assert share(100) < 0.2
    slow.set_trouble("is lost")
    slow.set_trouble("")
    assert slow.speed.slowness(clock.now_s) == 1.0, "it may be another machine now"


def test_an_answer_that_comes_whole_and_a_prompt_computed_elsewhere_say_nothing_of_pace() -> None:
    clock = Clock()
    router = servers(2, "load", clock)
    for number in range(400):
        clock.now_s += 0.01
        held = router.choose(RequestSummary(num_tokens=100, is_streamed=number % 2 == 0), ())
        assert held is not None
        if number % 2:
            held.sent_s -= 50.0 * held.server.index
            held.answer()
        held.leave()
    assert [server.speed.slowness(clock.now_s) for server in router] == [1.0, 1.0]


def test_whose_memory_is_taken_gets_nothing_that_another_can_hold() -> None:
    """What was sent there counts at once, what others have there from the next poll, and what they gave back as well."""
    router = servers(2, "load")
    little, much = router
    much.update_load(700, 0, kv_tokens=100_000)
    little.update_load(0, 0, kv_tokens=10_000, num_outputs=200)
    asked = RequestSummary(num_tokens=3000, max_outputs=100)
    held = [router.choose(asked, ()) for _ in range(4)]
    assert [each.server.index for each in held if each is not None] == [0, 0, 0, 1]
    ours = [each for each in held if each is not None and each.server is little]
    for each in ours:
        each.begin()
        each.leave()
    assert little.kv_free == 10_000
    little.update_load(1, 0, kv_tokens=10_000, kv_usage=0.9, num_outputs=200)
    assert little.kv_free == 1000
    third = router.choose(asked, ())
    assert third is not None and third.server is much
    small = router.choose(RequestSummary(num_tokens=500, max_outputs=100), ())
    assert small is not None and small.server is little
    little.update_load(0, 0, kv_tokens=10_000, kv_usage=0.05, before=[small], num_outputs=200)
    assert little.kv_free == 10_000 - small.num_kv_tokens - 500, (
        "of what is used there, none is that of a request that waits"
    )
    small.begin()
    little.update_load(0, 0, kv_tokens=10_000, kv_usage=0.05, before=[small])
    assert little.kv_free == 10_000 - small.num_kv_tokens, "it is that"


def test_where_nobody_can_hold_a_request_it_goes_where_it_would_have() -> None:
    router = servers(3, "load")
    for server in router:
        server.update_load(server.index, 0, kv_tokens=100)
    held = router.choose(RequestSummary(num_tokens=5000), ())
    assert held is not None and held.server.index == 0


def test_who_has_a_name_is_known_until_it_is_forgotten() -> None:
    holders = PrefixOwners()
    for who, names in ((1, [7, 8, 9]), (2, [7, 8]), (3, [7])):
        holders.add(names, who)
        holders.add(names, who)
    assert [(num, set(who)) for num, who in holders.of([7, 8, 9, 5])] == [
        (3, {1}),
        (2, {1, 2}),
        (1, {1, 2, 3}),
    ]
    holders.discard(8, 1)
    holders.discard(9, 1)
    holders.discard(9, 1)
    assert [(num, set(who)) for num, who in holders.of([7, 8, 9])] == [(2, {2}), (1, {1, 2, 3})]
    assert holders.of([5]) == [] and len(holders) == 2


def test_idle_servers_take_turns_however_many_there_are() -> None:
    for policy in ("prefix", "load", "round-robin"):
        router = servers(50, policy)  # type: ignore[arg-type]
        chosen = Counter()
        for _ in range(100):
            held = router.choose(RequestSummary(), ())
            assert held is not None
            chosen[held.server.index] += 1
            held.leave()
        assert len(chosen) > 45, policy


def test_where_others_send_too_not_all_routers_choose_the_same() -> None:
    """What each knows of the servers is the same, and old: one server seems idle."""
    chosen = Counter()
    for seed in range(20):
        router = Servers("load", random.Random(seed))
        router.set_urls([f"http://10.0.0.{index}:80" for index in range(50)], 1.0)
        for server in router:
            server.set_trouble("")
            server.update_load(0 if server.index == 7 else 5, 0)
        first, second = router.choose(RequestSummary(), ()), router.choose(RequestSummary(), ())
        assert first is not None and second is not None
        chosen[second.server.index] += 1
    assert max(chosen.values()) < 10


def test_a_session_is_looked_up_and_moves_when_its_server_goes() -> None:
    router = servers(40, "session")
    homes = {}
    for name in map(str, range(60)):
        held = router.choose(RequestSummary(session=name), ())
        again = router.choose(RequestSummary(session=name), ())
        assert held is not None and again is not None and held.server is again.server
        homes[name] = held.server
    gone = homes["0"]
    gone.set_trouble("is lost")
    for name, home in homes.items():
        held = router.choose(RequestSummary(session=name), ())
        assert held is not None and (held.server is home) == (home is not gone)
    gone.set_trouble("")
    held = router.choose(RequestSummary(session="0"), ())
    assert held is not None and held.server is gone, "it is back, and so are its sessions"


def test_what_is_remembered_is_bounded_over_all_servers_and_by_what_each_can_hold() -> None:
    router = servers(100)
    server = next(iter(router))
    assert server.prefixes.max_hashes == MAX_ALL_NAMES // 100
    server.update_load(0, 0, kv_tokens=PIECE_TOKENS * 10)
    held = router.choose(RequestSummary(list(range(30))), set(list(router)[1:]))
    assert held is not None and held.server is server and len(server.prefixes) == 10
    assert [num for num, _ in router._holders.of(list(range(30)))] == [10], "the end is forgotten"
    router.set_urls([], 1.0)
    held.leave()
    router.remove_idle()
    assert len(router._holders) == 0, "who left has nothing"


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0\n', 1600),
        (
            'vllm:cache_config_info{num_gpu_blocks="100",block_size="16",engine="0"} 1.0\n'
            'vllm:cache_config_info{num_gpu_blocks="50",block_size="16",engine="1"} 1.0\n',
            2400,
        ),
        ('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0\n', 0),
        ("vllm:num_requests_running 1\n", 0),
    ],
)
def test_how_much_a_server_can_hold_is_read_from_its_figures(text: str, num_tokens: int) -> None:
    assert parse_metrics(text).kv_tokens == num_tokens
