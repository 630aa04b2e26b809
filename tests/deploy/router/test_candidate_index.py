"""Candidate index: the same choice as a comparison of all servers, at bounded cost and memory."""

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
    """Clock that the test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def servers(count: int, policy: Routing = "prefix", clock: Clock | None = None) -> Servers:
    """Return ``count`` healthy servers."""
    router = Servers(policy, random.Random(0), clock=clock or Clock())
    router.set_urls([f"http://10.0.0.{index}:80" for index in range(count)], 1.0)
    for server in router:
        server.set_trouble("")
    return router


def cost(server: Server, request: RequestSummary) -> int:
    """Return the cost that `choose` minimizes, over all servers."""
    num_known, _ = server.prefixes.find(request.names)
    load = server.num_queued + RUNNING_TOKENS * (server.num_open + server.num_others)
    return load - PIECE_TOKENS * num_known


def chained(pieces: list[int]) -> list[int]:
    """Return names that each hash all pieces up to their own."""
    return list(accumulate(pieces, lambda name, piece: crc32(bytes(str(piece), "ascii"), name), initial=0))[
        1:
    ]


def test_candidates_include_the_best_server() -> None:
    """Prompts with nested shared prefixes; requests start, end and are retried; servers join and leave."""
    rng, router = random.Random(1), servers(60)
    running: list[HeldPrefixes] = []
    for number in range(1200):
        own_prompt, num_own = 1000 + rng.randrange(40), rng.randint(0, 20)
        pieces = [rng.randrange(3)] * rng.randint(0, 8) + [own_prompt] * num_own
        names = chained(pieces)
        request = RequestSummary(names, PIECE_TOKENS * len(names) + rng.randrange(64))
        without = rng.sample(list(router), rng.choice((0, 0, 1, 3)))
        left = [server for server in router.usable if server not in without]
        costs = {server: cost(server, request) for server in left}
        held = router.choose(request, without)
        assert held is not None and costs[held.server] == min(costs.values()), number
        running.append(held)
        if len(running) > 200 or rng.random() < 0.3:
            each = running.pop(rng.randrange(len(running)))
            each.begin()
            each.release()
        if number % 50 == 0:
            rng.choice(list(router)).set_trouble(rng.choice(("", "is lost")))
    assert any(len(indexes) > FEW for _, indexes in router._holders.of(chained([0]))), "hot prefixes occurred"


def test_candidates_include_faster_servers_and_free_memory() -> None:
    """Servers with different speeds and little memory: the choice is the best of all with enough memory."""
    rng, clock = random.Random(2), Clock()
    router = servers(60, clock=clock)
    for server in router:
        server.update_load(0, 0, kv_tokens=4000)
    running: list[HeldPrefixes] = []
    num_slow = num_full = 0
    for number in range(1500):
        clock.now_s += 0.01
        pieces = [rng.randrange(3)] * rng.randint(0, 8) + [1000 + rng.randrange(40)] * rng.randint(0, 20)
        names = chained(pieces)
        num_tokens = PIECE_TOKENS * len(names) + rng.randrange(1, 64)
        request = RequestSummary(names, num_tokens, is_streamed=True)
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
        held = router.choose(request, ())
        assert held is not None
        running.append(held)
        assert not costs or costs[held.server] == pytest.approx(min(costs.values()), rel=1e-9), number
        if len(running) > 150:
            each = running.pop(rng.randrange(len(running)))
            each.sent_s = clock.now_s - 1e-5 * each.num_before * (1 + each.server.index % 3)
            each.answer()
            each.release()
    assert num_slow and num_full


def test_slow_ttft_lowers_load_until_it_is_forgotten() -> None:
    clock = Clock()
    router = servers(2, "load", clock)

    def share(num: int) -> float:
        """Play requests, eight at a time; return the share of the first server, which is four times slower."""
        counts = Counter[int]()
        running: list[HeldPrefixes] = []
        for _ in range(num):
            clock.now_s += 0.1
            if len(running) == 8:
                running.pop(0).release()
            held = router.choose(RequestSummary(num_tokens=1000, is_streamed=True), ())
            assert held is not None
            counts[held.server.index] += 1
            running.append(held)
            held.sent_s = clock.now_s - 1e-5 * held.num_before * (1 if held.server.index else 4)
            held.answer()
        for each in running:
            each.release()
        return counts[0] / num

    assert share(64) == pytest.approx(0.5, abs=0.05), "nothing is measured"
    share(100)
    slow, fast = router
    assert slow.speed.slowness(clock.now_s) > fast.speed.slowness(clock.now_s)
    assert share(100) < 0.2
    slow.set_trouble("is lost")
    slow.set_trouble("")
    assert slow.speed.slowness(clock.now_s) == 1.0, "measurement has expired"


def test_unstreamed_and_disaggregated_requests_do_not_measure_ttft() -> None:
    clock = Clock()
    router = servers(2, "load", clock)
    for number in range(400):
        clock.now_s += 0.01
        held = router.choose(RequestSummary(num_tokens=100, is_streamed=number % 2 == 0), ())
        assert held is not None
        if number % 2:
            held.sent_s -= 50.0 * held.server.index
            held.answer()
        held.release()
    assert [server.speed.slowness(clock.now_s) for server in router] == [1.0, 1.0]


def test_full_server_gets_no_request_that_fits_elsewhere() -> None:
    """Requests sent there count at once; other routers' requests and released memory count from the next poll."""
    router = servers(2, "load")
    little, much = router
    much.update_load(700, 0, kv_tokens=100_000)
    little.update_load(0, 0, kv_tokens=10_000, num_outputs=200)
    request = RequestSummary(num_tokens=3000, max_outputs=100)
    held = [router.choose(request, ()) for _ in range(4)]
    assert [each.server.index for each in held if each is not None] == [0, 0, 0, 1]
    own_requests = [each for each in held if each is not None and each.server is little]
    for each in own_requests:
        each.begin()
        each.release()
    assert little.kv_free == 10_000
    little.update_load(1, 0, kv_tokens=10_000, kv_usage=0.9, num_outputs=200)
    assert little.kv_free == 1000
    third = router.choose(request, ())
    assert third is not None and third.server is much
    small = router.choose(RequestSummary(num_tokens=500, max_outputs=100), ())
    assert small is not None and small.server is little
    little.update_load(0, 0, kv_tokens=10_000, kv_usage=0.05, before=[small], num_outputs=200)
    assert little.kv_free == 10_000 - small.num_kv_tokens - 500, "used memory excludes waiting requests"
    small.begin()
    little.update_load(0, 0, kv_tokens=10_000, kv_usage=0.05, before=[small])
    assert little.kv_free == 10_000 - small.num_kv_tokens, "used memory is that of the running request"


def test_request_beyond_all_memory_ignores_memory() -> None:
    router = servers(3, "load")
    for server in router:
        server.update_load(server.index, 0, kv_tokens=100)
    held = router.choose(RequestSummary(num_tokens=5000), ())
    assert held is not None and held.server.index == 0


def test_prefix_holders_until_eviction() -> None:
    holders = PrefixOwners()
    for server_id, names in ((1, [7, 8, 9]), (2, [7, 8]), (3, [7])):
        holders.add(names, server_id)
        holders.add(names, server_id)
    assert [(num, set(server_id)) for num, server_id in holders.of([7, 8, 9, 5])] == [
        (3, {1}),
        (2, {1, 2}),
        (1, {1, 2, 3}),
    ]
    holders.discard(8, 1)
    holders.discard(9, 1)
    holders.discard(9, 1)
    assert [(num, set(server_id)) for num, server_id in holders.of([7, 8, 9])] == [(2, {2}), (1, {1, 2, 3})]
    assert holders.of([5]) == [] and len(holders) == 2


def test_idle_servers_are_chosen_in_rotation() -> None:
    for policy in ("prefix", "load", "round-robin"):
        router = servers(50, policy)  # type: ignore[arg-type]
        chosen = Counter()
        for _ in range(100):
            held = router.choose(RequestSummary(), ())
            assert held is not None
            chosen[held.server.index] += 1
            held.release()
        assert len(chosen) > 45, policy


def test_several_routers_spread_their_choices() -> None:
    """All routers have the same stale view: one server seems idle."""
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


def test_session_moves_when_its_server_leaves() -> None:
    router = servers(40, "session")
    servers_of = {}
    for name in map(str, range(60)):
        held = router.choose(RequestSummary(session=name), ())
        again = router.choose(RequestSummary(session=name), ())
        assert held is not None and again is not None and held.server is again.server
        servers_of[name] = held.server
    gone = servers_of["0"]
    gone.set_trouble("is lost")
    for name, server_of in servers_of.items():
        held = router.choose(RequestSummary(session=name), ())
        assert held is not None and (held.server is server_of) == (server_of is not gone)
    gone.set_trouble("")
    held = router.choose(RequestSummary(session="0"), ())
    assert held is not None and held.server is gone, "sessions return with their server"


def test_remembered_prefixes_are_bounded() -> None:
    router = servers(100)
    server = next(iter(router))
    assert server.prefixes.max_hashes == MAX_ALL_NAMES // 100
    server.update_load(0, 0, kv_tokens=PIECE_TOKENS * 10)
    held = router.choose(RequestSummary(list(range(30))), set(list(router)[1:]))
    assert held is not None and held.server is server and len(server.prefixes) == 10
    assert [num for num, _ in router._holders.of(list(range(30)))] == [10], "the tail is forgotten"
    router.set_urls([], 1.0)
    held.release()
    router.remove_idle()
    assert len(router._holders) == 0, "removed server has no prefixes"


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
def test_kv_capacity_is_read_from_metrics(text: str, num_tokens: int) -> None:
    assert parse_metrics(text).kv_tokens == num_tokens
