"""Hedged requests: the first answer wins, the other copy is cancelled, copies are few."""

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
    respond,
    run,
    texts,
    whole,
    world,
)

from quintet.deploy.router.attempts import Hedging

BUSY = respond(head(429, kind=b"application/json") + b"{}")


class Slow:
    """Server that answers when the test allows it, and notes a disconnect of the router."""

    def __init__(self) -> None:
        self.arrived, self.may_answer, self.was_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.arrived.set()
        try:
            while not self.may_answer.is_set():
                writer.write(b"HTTP/1.1 100 x\r\n\r\n")  # so that it sees the disconnect
                await writer.drain()
                await asyncio.sleep(0.01)
            await whole(up, received, writer)
        except ConnectionError:
            self.was_left.set()


def prefer_first(w: World) -> None:
    for place, up in enumerate(w.ups):
        next(server for server in w.servers if server.url == up.url).update_load(100 * place, 0)


async def counted(w: World) -> int:
    text = (await w.request("/metrics", None, "GET")).body.decode()
    return next(
        int(float(line.split()[1]))
        for line in text.splitlines()
        if line.startswith("quintet_route:hedges_total")
    )


def accounts_are_clear(w: World) -> bool:
    return all(server.num_open == server.num_queued == 0 and not server.holds for server in w.servers)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/rerank", "/score"])
def test_copy_of_a_pooling_request_answers(path: str) -> None:
    async def scenario() -> None:
        slow = Slow()
        async with world(slow, whole, hedge_after_s=0.02) as w:
            prefer_first(w)
            assert (await w.request(path, {"input": "x"})).status == 200
            await slow.was_left.wait()
            assert await counted(w) == 1 and accounts_are_clear(w)

    run(scenario())


def test_copy_answers_and_slow_server_is_cancelled() -> None:
    async def scenario() -> None:
        slow = Slow()
        fast = respond(head(200), event(0), event(1), DONE)
        async with world(slow, fast, hedge_after_s=0.02) as w:
            prefer_first(w)
            assert texts(await w.request(C, STREAM)) == ["t0", "t1"]
            await slow.was_left.wait()
            assert [len(up.received) for up in w.ups] == [1, 1]
            assert w.ups[0].received[0]["body"] == w.ups[1].received[0]["body"]
            assert await counted(w) == 1 and accounts_are_clear(w)

    run(scenario())


def test_rejected_or_lost_copy_changes_nothing() -> None:
    async def scenario(other: Answer) -> None:
        slow = Slow()

        async def then_releases(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await other(up, received, writer)
            slow.may_answer.set()

        async with world(slow, then_releases, hedge_after_s=0.02) as w:
            prefer_first(w)
            response = await w.request(C, STREAM)
            assert response.status == 200 and response.body == b'{"ok":true}'
            assert await counted(w) == 1 and accounts_are_clear(w)

    run(scenario(BUSY))
    for status in (400, 404, 500):
        run(scenario(respond(head(status, kind=b"application/json") + b"{}")))
    run(scenario(respond(cut=True)))


def test_error_of_first_is_passed_on_at_once() -> None:
    async def scenario() -> None:
        copy = Slow()

        async def refuses(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await copy.arrived.wait()
            await respond(head(400, kind=b"application/json") + b"{}")(up, received, writer)

        async with world(refuses, copy, hedge_after_s=0.02) as w:
            prefer_first(w)
            assert (await asyncio.wait_for(w.request(C, STREAM), 10)).status == 400
            await copy.was_left.wait()
            assert accounts_are_clear(w)

    run(scenario())


def test_no_copy_for_fast_requests_or_by_default() -> None:
    async def scenario() -> None:
        async with world(whole, whole, hedge_after_s=30.0) as w:
            assert (await w.request(C, STREAM)).status == 200
            assert await counted(w) == 0
        slow = Slow()
        async with world(slow, whole) as w:
            prefer_first(w)
            first_request = asyncio.create_task(w.request(C, STREAM))
            await slow.arrived.wait()
            slow.may_answer.set()
            assert (await first_request).status == 200 and not w.ups[1].received

    run(scenario())


def test_few_copies_when_all_servers_are_slow() -> None:
    async def scenario() -> None:
        slow = Slow()
        async with world(slow, slow, hedge_after_s=0.02) as w:
            first = asyncio.create_task(w.request(C, STREAM))
            while not all(up.received for up in w.ups):
                await asyncio.sleep(0.005)
            others = [asyncio.create_task(w.request(C, STREAM)) for _ in range(4)]
            while sum(len(up.received) for up in w.ups) < 6:
                await asyncio.sleep(0.005)
            slow.may_answer.set()
            assert all(response.status == 200 for response in await asyncio.gather(first, *others))
            assert await counted(w) == 1

    run(scenario())


def test_non_idempotent_request_has_no_copy() -> None:
    async def scenario(path: str) -> None:
        slow = Slow()
        async with world(slow, whole, hedge_after_s=0.001) as w:
            prefer_first(w)
            first_request = asyncio.create_task(w.request(path, {}))
            await slow.arrived.wait()
            slow.may_answer.set()
            assert (await first_request).status == 200
            assert await counted(w) == 0

    run(scenario("/v1/conversations"))
    run(scenario("/v1/responses"))


def test_copy_budget_is_bounded() -> None:
    hedging = Hedging(after_s=1.0)
    for _ in range(10_000):
        hedging.earn()
    num_copies = 0
    while hedging.is_allowed():
        hedging.spend()
        num_copies += 1
    assert num_copies == 5


def test_disconnect_cancels_both_copies() -> None:
    async def scenario() -> None:
        slow, other = Slow(), Slow()
        async with world(slow, other, hedge_after_s=0.02) as w:
            first_request = asyncio.create_task(w.request(C, STREAM))
            await slow.arrived.wait()
            await other.arrived.wait()
            first_request.cancel()
            await slow.was_left.wait()
            await other.was_left.wait()
            await asyncio.wait([first_request])
            assert accounts_are_clear(w)

    run(scenario())


@pytest.mark.parametrize("num_before", [0, 1])
def test_request_that_kills_servers_reaches_two_with_copies(
    num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``num_before``: servers killed before the request could have a copy."""

    async def scenario() -> None:
        num_received = 0
        has_copy = asyncio.Event()

        async def dies(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal num_received
            num_received += 1
            if num_received == num_before + 2:
                has_copy.set()
            if num_received > num_before:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(has_copy.wait(), 0.3)
            writer.transport.abort()

        async with world(dies, dies, dies, dies, hedge_after_s=0.02) as w:
            prefer_first(w)
            response = await w.request(C, STREAM)
            assert response.status == 503 and "2 servers were lost" in response.body.decode()
            assert [len(up.received) for up in w.ups] == [1, 1, 0, 0]
            assert await counted(w) == 1 - num_before and accounts_are_clear(w)

    with caplog.at_level("INFO", "quintet"):
        run(scenario())
    assert len([line for line in caplog.messages if "while it had request" in line]) == 2


def test_lost_copy_counts_when_the_first_answers() -> None:
    async def scenario() -> None:
        slow = Slow()

        async def dies(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            slow.may_answer.set()
            writer.transport.abort()

        async def fail_after_first_bytes(
            up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter
        ) -> None:
            await slow.may_answer.wait()
            while copied.pool._open:
                await asyncio.sleep(0.005)
            await respond(head(200), b": keep-alive\n", cut=True)(up, received, writer)

        async with world(fail_after_first_bytes, dies, whole, hedge_after_s=0.02) as w:
            copied = list(w.servers)[1]
            prefer_first(w)
            response = await w.request(C, STREAM)
            assert "2 servers were lost" in response.body.decode()
            assert [len(up.received) for up in w.ups] == [1, 1, 0]

    run(scenario())
