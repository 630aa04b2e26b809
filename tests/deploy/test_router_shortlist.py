"""The choice among many servers: the same as if all were compared, at a cost and in a memory that do not grow with them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from zlib import crc32

import pytest

from quintet.deploy.router.asked import Asked
from quintet.deploy.router.figures import read_figures
from quintet.deploy.router.servers import MAX_ALL_NAMES, Held, Server, Servers
from quintet.deploy.router.shortlist import FEW
from quintet.frontend.beginnings import PIECE_TOKENS, Holders
from quintet.frontend.router import RUNNING_TOKENS
from quintet.wire.config import Routing


def servers(count: int, policy: Routing = "prefix") -> Servers:
    """Return so many that are well."""
    router = Servers(policy, random.Random(0))
    router.become([f"http://10.0.0.{index}:80" for index in range(count)], 1.0)
    for server in router:
        server.note("")
    return router


def cost(server: Server, asked: Asked) -> int:
    """Return what `choose` minimizes, with nothing left out."""
    num_known, _ = server.beginnings.find(asked.names)
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
    going: list[Held] = []
    for number in range(1200):
        own, num_own = 1000 + rng.randrange(40), rng.randint(0, 20)
        pieces = [rng.randrange(3)] * rng.randint(0, 8) + [own] * num_own
        names = chained(pieces)
        asked = Asked(names, PIECE_TOKENS * len(names) + rng.randrange(64))
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
            rng.choice(list(router)).note(rng.choice(("", "is lost")))
    assert any(len(indexes) > FEW for _, indexes in router._holders.of(chained([0]))), (
        "hot beginnings were had"
    )


def test_who_has_a_name_is_known_until_it_is_forgotten() -> None:
    holders = Holders()
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
            held = router.choose(Asked(), ())
            assert held is not None
            chosen[held.server.index] += 1
            held.leave()
        assert len(chosen) > 45, policy


def test_where_others_send_too_not_all_routers_choose_the_same() -> None:
    """What each knows of the servers is the same, and old: one server seems idle."""
    chosen = Counter()
    for seed in range(20):
        router = Servers("load", random.Random(seed))
        router.become([f"http://10.0.0.{index}:80" for index in range(50)], 1.0)
        for server in router:
            server.note("")
            server.hear(0 if server.index == 7 else 5, 0)
        first, second = router.choose(Asked(), ()), router.choose(Asked(), ())
        assert first is not None and second is not None
        chosen[second.server.index] += 1
    assert max(chosen.values()) < 10


def test_a_session_is_looked_up_and_moves_when_its_server_goes() -> None:
    router = servers(40, "session")
    homes = {}
    for name in map(str, range(60)):
        held = router.choose(Asked(session=name), ())
        again = router.choose(Asked(session=name), ())
        assert held is not None and again is not None and held.server is again.server
        homes[name] = held.server
    gone = homes["0"]
    gone.note("is lost")
    for name, home in homes.items():
        held = router.choose(Asked(session=name), ())
        assert held is not None and (held.server is home) == (home is not gone)
    gone.note("")
    held = router.choose(Asked(session="0"), ())
    assert held is not None and held.server is gone, "it is back, and so are its sessions"


def test_what_is_remembered_is_bounded_over_all_servers_and_by_what_each_can_hold() -> None:
    router = servers(100)
    server = next(iter(router))
    assert server.beginnings.max_names == MAX_ALL_NAMES // 100
    server.hear(0, 0, kv_tokens=PIECE_TOKENS * 10)
    held = router.choose(Asked(list(range(30))), set(list(router)[1:]))
    assert held is not None and held.server is server and len(server.beginnings) == 10
    assert [num for num, _ in router._holders.of(list(range(30)))] == [10], "the end is forgotten"
    router.become([], 1.0)
    held.leave()
    router.part()
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
    assert read_figures(text).kv_tokens == num_tokens
