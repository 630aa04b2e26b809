"""Servers that are lost, refuse, or leave while the router has requests there: who is asked next, and what a client hears."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from tests.deploy.router.test_router import (
    BUSY,
    DONE,
    LOST,
    STREAM,
    TICKET,
    Answer,
    C,
    M,
    Upstream,
    World,
    by_path,
    event,
    head,
    run,
    says,
    texts,
    whole,
    world,
)

from quintet.deploy.router.events import MAX_EVENT_BYTES, Events
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.frontend.resume.token_relay import replayed_comments

JSON = b"content-type: application/json\r\ncontent-length: 2\r\n"
KEPT = b"HTTP/1.1 200 x\r\n" + JSON + b"\r\n{}"
"""An answer after which the connection stays."""
ERROR = b'data: {"error":{"message":"leaving","type":"t","param":null,"code":503}}\n\n'


def prefer(w: World, *order: int) -> None:
    """Have servers chosen in this order."""
    by_url = {w.ups[index].url: 100 * place for place, index in enumerate(order)}
    for server in w.servers:
        server.update_load(by_url[server.url], 0)


def test_a_refusal_is_told_as_it_came_whatever_its_connection_does_next() -> None:
    async def story() -> None:
        later, may_refuse = asyncio.Event(), asyncio.Event()

        async def refuses_then_streams(
            up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter
        ) -> None:
            if len(up.asked) == 1:
                writer.write(b"HTTP/1.1 429 x\r\nretry-after: 9\r\n" + JSON + b"\r\n{}")
                return
            writer.write(b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\nx-stream-id: secret\r\n\r\n")
            writer.write(event(0))
            await writer.drain()
            later.set()
            await may_refuse.wait()
            writer.write(DONE)
            writer.close()

        async def dies_late(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            other.append(asyncio.ensure_future(w.ask(C, STREAM)))
            await later.wait()
            writer.transport.abort()

        other: list[Any] = []
        async with world(dies_late, refuses_then_streams) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            told = await w.ask(C, {"prompt": "x"})
            assert (told.status, told.headers.get("retry-after")) == (429, "9")
            assert "secret" not in str(told.headers)
            may_refuse.set()
            assert (await other[0]).headers["x-stream-id"] == "secret"

    run(story())


def dies_on_its_second(status: bytes = KEPT) -> Answer:
    async def answer(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(up.asked) == 2:
            writer.transport.abort()
        else:
            writer.write(status)

    return answer


@pytest.mark.parametrize("is_at_once", [True, False])
def test_only_a_connection_that_breaks_at_once_was_closed_before(is_at_once: bool) -> None:
    async def story() -> None:
        async with world(whole, dies_on_its_second()) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            await w.ask(C, {"prompt": "x"})
            for server in w.servers:
                server.pool.round_trip_s = 10.0 if is_at_once else -10.0
            assert (await w.ask(C, {"prompt": "x"})).status == 200
            assert [len(up.asked) for up in w.ups] == ([0, 3] if is_at_once else [1, 2])

    run(story())


def test_what_must_not_be_done_twice_has_a_connection_of_its_own() -> None:
    async def story() -> None:
        async with world(whole, dies_on_its_second()) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            await w.ask(C, {"prompt": "x"})
            for server in w.servers:
                server.pool.round_trip_s = 10.0
            told = await w.ask("/v1/conversations", {})
            assert told.status == 503 and [len(up.asked) for up in w.ups] == [0, 2]

    run(story())


@pytest.mark.parametrize("begins", [False, True])
def test_a_stream_that_servers_die_of_does_not_visit_them_all(begins: bool) -> None:
    async def story() -> None:
        dies = by_path(begin=says(head(200, TICKET), b": keep-alive\n", cut=True), go_on=says(cut=True))
        async with world(dies, dies, dies, LOST if begins else dies) as w:
            prefer(w, 3, 2, 1, 0)
            told = await w.ask(C, STREAM)
            assert "2 servers were lost" in told.body.decode()
            assert sum(bool(up.asked) for up in w.ups) == 2

    run(story())


def test_a_server_that_refuses_to_go_on_is_not_asked_again_and_a_full_one_when_it_says() -> None:
    async def story() -> None:
        async with world(
            by_path(go_on=says(head(429, b"retry-after: 60", kind=b"application/json") + b"{}")),
            by_path(go_on=says(head(400, kind=b"application/json") + b"{}")),
            LOST,
        ) as w:
            w.app._timeouts = ProxyTimeouts(0.2, 1.0)
            prefer(w, 2, 1, 0)
            told = await w.ask(C, STREAM)
            assert "no server can resume" in told.body.decode()
            assert [len(up.asked) for up in w.ups[:2]] == [1, 1]

    run(story())


def test_a_stream_whose_server_leaves_goes_on_elsewhere() -> None:
    async def story() -> None:
        second = by_path(
            go_on=says(head(200, TICKET), event(1, "c3-d4") + DONE), begin=says(head(200), event(0), DONE)
        )
        for said, expected in ((event(0), ["t0", "t1"]), (b"", ["t0"])):
            async with world(second, by_path(begin=says(head(200, TICKET), said + ERROR + DONE))) as w:
                prefer(w, 1, 0)
                told = await w.ask(C, STREAM)
                assert texts(told) == expected and b"error" not in told.body
        async with world(second, says(head(200), ERROR + DONE)) as w:  # nothing said that another could go on
            prefer(w, 1, 0)
            assert b"leaving" in (await w.ask(C, STREAM)).body

    run(story())


def named(name: str, position: str, token: int | None = None, stream: str = "a1-b2") -> bytes:
    """Return an event with a name, as a server that is asked for its tokens tells it."""
    note = b"" if token is None else b": ids 0 [%d]\n" % token
    words = f'id: {stream}:{position}\nevent: {name}\ndata: {{"type":"{name}"}}\n\n'
    return note + words.encode()


LEAVES = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"leaving"}}\n\n'


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_stream_of_messages_goes_on_elsewhere(is_killed: bool) -> None:
    async def story() -> None:
        begun = [
            named("message_start", "0.0n"),
            named("content_block_start", "0.1t"),
            named("content_block_delta", "1.1t", 100),
        ]
        rest = [
            named("content_block_delta", "2.1t", 101, "c3-d4"),
            named("content_block_stop", "2.1n", None, "c3-d4"),
            named("message_stop", "2e.1n", None, "c3-d4"),
        ]
        ticket = b"x-quintet-relay: 7.0"
        second = by_path(go_on=says(head(200, ticket), *rest))
        first = says(head(200, ticket), *begun, b"" if is_killed else LEAVES, cut=is_killed)
        async with world(second, by_path(begin=first)) as w:
            prefer(w, 1, 0)
            told = await w.ask("/v1/messages", STREAM)
            assert told.body == re.sub(rb": ids .*\n", b"", b"".join(begun + rest))
            going = json.loads(w.ups[0].asked[-1]["body"])
            assert (going["path"], going["position"], going["outputs"]) == ("/v1/messages", "1.1t", [[100]])
            assert (going["seeds"], going["created"]) == ([7], 0)

    run(story())


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_stream_of_responses_goes_on_elsewhere_under_its_name(is_killed: bool) -> None:
    async def story() -> None:
        begun = [
            named("response.created", "0.1+0+1"),
            named("response.output_text.delta", "1.5+3+0", 100),
        ]
        rest = [named("response.completed", "2e.9+6+4", 101, "c3-d4")]
        ticket, name = b"x-quintet-relay: 7.1700000000.resp_ab12", "resp_ab12"
        second = by_path(go_on=says(head(200, ticket), *rest))
        leaves = b": withdrawn\nevent: response.failed\ndata: {}\n\n"
        first = says(head(200, ticket), *begun, b"" if is_killed else leaves, cut=is_killed)
        async with world(second, by_path(begin=first)) as w:
            prefer(w, 1, 0)
            told = await w.ask("/v1/responses", STREAM)
            assert told.body == re.sub(rb": ids .*\n", b"", b"".join(begun + rest))
            going = json.loads(w.ups[0].asked[-1]["body"])
            assert (going["path"], going["position"], going["outputs"]) == (
                "/v1/responses",
                "1.5+3+0",
                [[100]],
            )
            assert (going["seeds"], going["created"], going["name"]) == ([7], 1_700_000_000, name)

    run(story())


def test_another_error_of_a_stream_of_messages_is_its_clients() -> None:
    async def story() -> None:
        broken = LEAVES.replace(b"overloaded_error", b"api_error")
        begun = named("message_start", "0.0n")
        async with world(LOST, says(head(200, b"x-quintet-relay: 7.0"), begun, broken)) as w:
            prefer(w, 1, 0)
            assert (await w.ask("/v1/messages", STREAM)).body == begun + broken

    run(story())


def test_a_server_that_hangs_up_again_and_again_is_left() -> None:
    async def story() -> None:
        second = by_path(go_on=says(head(200, TICKET), event(1, "c3-d4") + DONE))
        hangs_up = by_path(
            begin=says(head(200, TICKET), event(0), cut=True), rest=says(head(200, TICKET), b": \n", cut=True)
        )
        async with world(second, hangs_up) as w:
            prefer(w, 1, 0)
            assert texts(await w.ask(C, STREAM)) == ["t0", "t1"]
            assert len(w.ups[1].asked) == 2

    run(story())


def test_a_stream_of_which_only_comments_were_told_is_sent_again() -> None:
    async def story() -> None:
        silent = says(head(200, TICKET), b": keep-alive\n", cut=True)
        async with world(says(head(200, TICKET), event(0) + DONE), silent) as w:
            prefer(w, 1, 0)
            assert (await w.ask(C, STREAM)).body.startswith(b": keep-alive\nid: a1-b2:1\n")
        async with world(BUSY, silent) as w:
            prefer(w, 1, 0)
            assert b"answered with status 503" in (await w.ask(C, STREAM)).body

    run(story())


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_events_end_as_their_server_ends_lines(end: bytes) -> None:
    async def story() -> None:
        said = (b"data: {}\n\n" + b"event: message_stop\ndata: {}\n\n").replace(b"\n", end)
        async with world(says(head(200), said)) as w:
            assert (await w.ask(M, STREAM)).body == said
        async with world(says(head(200, b"content-length: 8"), b"data: {}")) as w:
            assert (await w.ask(M, STREAM)).body == b"data: {}"

    run(story())
    relayed = Events(is_relayed=True)
    assert b"ids" not in relayed.take(event(0).replace(b"\n", b"\r\n"))
    assert relayed.take_resume_state() == ("a1-b2", "1", [[100]])


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    events = Events(is_relayed=True)
    assert events.take(event(0))
    assert len(events.take(b"data: " + b"x" * MAX_EVENT_BYTES)) > MAX_EVENT_BYTES
    assert events.take_resume_state() is None


def test_nobody_else_goes_on_with_tokens_that_the_router_does_not_know() -> None:
    events = Events(is_relayed=True)
    events.take(event(7))
    assert events.take_resume_state() == ("a1-b2", "8", None)


def test_headers_between_two_neighbours_stay_there() -> None:
    async def story() -> None:
        answer = says(
            head(200, b"x-kept: 1", b"proxy-connection: a", b"x-hop: 1", b"connection: x-hop") + DONE
        )
        async with world(answer) as w:
            told = await w.ask(
                C, STREAM, connection="keep-alive, X-Mine", x_mine="1", trailer="a", x_other="2"
            )
            assert not {"x-hop", "proxy-connection", "connection"} & told.headers.keys()
            assert told.headers["x-kept"] == "1"
            sent = w.ups[0].asked[0]["headers"]
            assert not {"connection", "x-mine", "trailer"} & sent.keys() and sent["x-other"] == "2"
            assert json.loads(w.ups[0].asked[0]["body"]) == STREAM

    run(story())


def test_a_stream_that_its_client_came_back_for_goes_on_at_another_server() -> None:
    """The request is there, and the server tells the tokens of the events that another router passed on."""

    async def story() -> None:
        rest = by_path(
            begin=says(head(200, TICKET), b": told 0 [100]\n\n: ids 0 [101]\n\n", event(2), cut=True)
        )
        second = by_path(go_on=says(head(200, TICKET), event(3, "c3-d4") + DONE))
        async with world(second, rest) as w:
            told = await w.ask(C, STREAM, last_event_id="a1-b2:2")
            assert texts(told) == ["t2", "t3"] and b": ids" not in told.body and b": told" not in told.body
            going = json.loads(w.ups[0].asked[-1]["body"])
            assert (going["position"], going["outputs"]) == ("3", [[100, 101, 102]])

    run(story())


def test_what_a_server_tells_again_is_not_counted_twice() -> None:
    """It hangs up, and goes on; so it tells what it told before. Then it is lost, and another server gets each token once."""

    async def story() -> None:
        again = says(head(200, TICKET), b": told 0 [100,101]\n\n", event(2), cut=True)

        async def tells_again_once(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            if len(up.asked) == 2:
                await again(up, asked, writer)
            else:
                writer.transport.abort()

        once = by_path(begin=says(head(200, TICKET), event(0), event(1), cut=True), rest=tells_again_once)
        second = by_path(go_on=says(head(200, TICKET), event(3, "c3-d4") + DONE))
        async with world(second, once) as w:
            assert texts(await w.ask(C, STREAM)) == ["t0", "t1", "t2", "t3"]
            going = json.loads(w.ups[0].asked[-1]["body"])
            assert (going["position"], going["outputs"]) == ("3", [[100, 101, 102]])

    run(story())


def test_a_long_story_told_again_tears_no_stream() -> None:
    notes = b"".join(replayed_comments(0, range(100_000, 300_000)))
    assert len(notes) > MAX_EVENT_BYTES
    events = Events(True)
    pieces = [notes[first : first + 65_536] for first in range(0, len(notes), 65_536)]
    assert not b"".join(map(events.take, pieces)).strip()
    assert events.take(b'id: a1-b2:200000\ndata: {"choices":[]}\n\n')
    again = events.take_resume_state()
    assert again is not None and again[2] == [list(range(100_000, 300_000))]
