"""A second copy of a request that is slow to begin: who answers, who is let go, and that there are few of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tests.deploy.router.test_router import (
    DONE,
    STREAM,
    Answer,
    C,
    Upstream,
    World,
    event,
    head,
    run,
    says,
    texts,
    whole,
    world,
)

from quintet.deploy.router.attempts import Hedging

BUSY = says(head(429, kind=b"application/json") + b"{}")


class Slow:
    """A server that answers when it may, and notes when the router hangs up instead."""

    def __init__(self) -> None:
        self.came, self.may_answer, self.was_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.came.set()
        try:
            while not self.may_answer.is_set():
                writer.write(b"HTTP/1.1 100 x\r\n\r\n")  # so that it hears that nobody listens
                await writer.drain()
                await asyncio.sleep(0.01)
            await whole(up, asked, writer)
        except ConnectionError:
            self.was_left.set()


def prefer_first(w: World) -> None:
    for place, up in enumerate(w.ups):
        next(server for server in w.servers if server.url == up.url).update_load(100 * place, 0)


async def counted(w: World) -> int:
    text = (await w.ask("/metrics", None, "GET")).body.decode()
    return next(
        int(float(line.split()[1]))
        for line in text.splitlines()
        if line.startswith("quintet_route:hedges_total")
    )


def accounts_are_clear(w: World) -> bool:
    return all(server.num_open == server.num_queued == 0 and not server.holds for server in w.servers)


def test_the_copy_answers_and_the_slow_server_is_left() -> None:
    async def story() -> None:
        slow = Slow()
        fast = says(head(200), event(0), event(1), DONE)
        async with world(slow, fast, hedge_after_s=0.02) as w:
            prefer_first(w)
            assert texts(await w.ask(C, STREAM)) == ["t0", "t1"]
            await slow.was_left.wait()
            assert [len(up.asked) for up in w.ups] == [1, 1]
            assert w.ups[0].asked[0]["body"] == w.ups[1].asked[0]["body"]
            assert await counted(w) == 1 and accounts_are_clear(w)

    run(story())


def test_a_copy_that_is_refused_or_lost_changes_nothing() -> None:
    async def story(other: Answer) -> None:
        slow = Slow()

        async def then_lets(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await other(up, asked, writer)
            slow.may_answer.set()

        async with world(slow, then_lets, hedge_after_s=0.02) as w:
            prefer_first(w)
            told = await w.ask(C, STREAM)
            assert told.status == 200 and told.body == b'{"ok":true}'
            assert await counted(w) == 1 and accounts_are_clear(w)

    run(story(BUSY))
    for status in (400, 404, 500):
        run(story(says(head(status, kind=b"application/json") + b"{}")))
    run(story(says(cut=True)))


def test_an_error_of_the_first_is_told_without_waiting_for_the_copy() -> None:
    async def story() -> None:
        copy = Slow()

        async def refuses(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await copy.came.wait()
            await says(head(400, kind=b"application/json") + b"{}")(up, asked, writer)

        async with world(refuses, copy, hedge_after_s=0.02) as w:
            prefer_first(w)
            assert (await asyncio.wait_for(w.ask(C, STREAM), 10)).status == 400
            await copy.was_left.wait()
            assert accounts_are_clear(w)

    run(story())


def test_a_request_that_begins_in_time_has_no_copy_nor_has_any_by_default() -> None:
    async def story() -> None:
        async with world(whole, whole, hedge_after_s=30.0) as w:
            assert (await w.ask(C, STREAM)).status == 200
            assert await counted(w) == 0
        slow = Slow()
        async with world(slow, whole) as w:
            prefer_first(w)
            asking = asyncio.create_task(w.ask(C, STREAM))
            await slow.came.wait()
            slow.may_answer.set()
            assert (await asking).status == 200 and not w.ups[1].asked

    run(story())


def test_where_everything_is_slow_few_are_copied() -> None:
    async def story() -> None:
        slow = Slow()
        async with world(slow, slow, hedge_after_s=0.02) as w:
            first = asyncio.create_task(w.ask(C, STREAM))
            while not all(up.asked for up in w.ups):
                await asyncio.sleep(0.005)
            others = [asyncio.create_task(w.ask(C, STREAM)) for _ in range(4)]
            while sum(len(up.asked) for up in w.ups) < 6:
                await asyncio.sleep(0.005)
            slow.may_answer.set()
            assert all(told.status == 200 for told in await asyncio.gather(first, *others))
            assert await counted(w) == 1

    run(story())


def test_what_may_be_done_only_once_has_no_copy() -> None:
    async def story(path: str) -> None:
        slow = Slow()
        async with world(slow, whole, hedge_after_s=0.001) as w:
            prefer_first(w)
            asking = asyncio.create_task(w.ask(path, {}))
            await slow.came.wait()
            slow.may_answer.set()
            assert (await asking).status == 200
            assert await counted(w) == 0

    run(story("/v1/conversations"))
    run(story("/v1/responses"))


def test_a_long_quiet_time_saves_up_only_a_few_copies() -> None:
    hedging = Hedging(after_s=1.0)
    for _ in range(10_000):
        hedging.earn()
    num_copies = 0
    while hedging.is_allowed():
        hedging.spend()
        num_copies += 1
    assert num_copies == 5


def test_a_client_that_leaves_takes_both_along() -> None:
    async def story() -> None:
        slow, other = Slow(), Slow()
        async with world(slow, other, hedge_after_s=0.02) as w:
            asking = asyncio.create_task(w.ask(C, STREAM))
            await slow.came.wait()
            await other.came.wait()
            asking.cancel()
            await slow.was_left.wait()
            await other.was_left.wait()
            await asyncio.wait([asking])
            assert accounts_are_clear(w)

    run(story())


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_request_that_kills_servers_reaches_two_with_copies_too(
    num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``num_before``: servers that it kills before it could have a copy."""

    async def story() -> None:
        num_asked = 0
        has_copy = asyncio.Event()

        async def dies(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == num_before + 2:
                has_copy.set()
            if num_asked > num_before:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(has_copy.wait(), 0.3)
            writer.transport.abort()

        async with world(dies, dies, dies, dies, hedge_after_s=0.02) as w:
            prefer_first(w)
            told = await w.ask(C, STREAM)
            assert told.status == 503 and "2 servers were lost" in told.body.decode()
            assert [len(up.asked) for up in w.ups] == [1, 1, 0, 0]
            assert await counted(w) == 1 - num_before and accounts_are_clear(w)

    with caplog.at_level("INFO", "quintet"):
        run(story())
    assert len([line for line in caplog.messages if "while it had request" in line]) == 2


def test_a_copy_that_its_server_was_lost_of_counts_where_the_first_answers() -> None:
    async def story() -> None:
        slow = Slow()

        async def dies(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            slow.may_answer.set()
            writer.transport.abort()

        async def begins_and_dies(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await slow.may_answer.wait()
            while copied.pool._open:
                await asyncio.sleep(0.005)
            await says(head(200), b": keep-alive\n", cut=True)(up, asked, writer)

        async with world(begins_and_dies, dies, whole, hedge_after_s=0.02) as w:
            copied = list(w.servers)[1]
            prefer_first(w)
            told = await w.ask(C, STREAM)
            assert "2 servers were lost" in told.body.decode()
            assert [len(up.asked) for up in w.ups] == [1, 1, 0]

    run(story())
