"""Failover: retries and stream resumption when servers die, refuse or drain."""

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
    respond,
    run,
    texts,
    whole,
    world,
)

from quintet.deploy.router.events import MAX_EVENT_BYTES, Events
from quintet.deploy.router.proxy import ProxyTimeouts
from quintet.frontend.resume.token_relay import replayed_comments

JSON = b"content-type: application/json\r\ncontent-length: 2\r\n"
KEPT = b"HTTP/1.1 200 x\r\n" + JSON + b"\r\n{}"
"""Answer that keeps the connection open."""
ERROR = b'data: {"error":{"message":"leaving","type":"t","param":null,"code":"503"}}\n\n'


def prefer(w: World, *order: int) -> None:
    """Make the router choose servers in this order."""
    by_url = {w.ups[index].url: 100 * place for place, index in enumerate(order)}
    for server in w.servers:
        server.update_load(by_url[server.url], 0)


def test_rejection_is_passed_on_despite_later_connection_loss() -> None:
    async def scenario() -> None:
        later, refuses = asyncio.Event(), asyncio.Event()

        async def refuses_then_streams(
            up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter
        ) -> None:
            if len(up.received) == 1:
                writer.write(b"HTTP/1.1 429 x\r\nretry-after: 9\r\n" + JSON + b"\r\n{}")
                return
            writer.write(b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\nx-stream-id: secret\r\n\r\n")
            writer.write(event(0))
            await writer.drain()
            later.set()
            await refuses.wait()
            writer.write(DONE)
            writer.close()

        async def fail_late(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            other.append(asyncio.ensure_future(w.request(C, STREAM)))
            await later.wait()
            writer.transport.abort()

        other: list[Any] = []
        async with world(fail_late, refuses_then_streams) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            response = await w.request(C, {"prompt": "x"})
            assert (response.status, response.headers.get("retry-after")) == (429, "9")
            assert "secret" not in str(response.headers)
            refuses.set()
            assert (await other[0]).headers["x-stream-id"] == "secret"

    run(scenario())


def fail_on_second_request(status: bytes = KEPT) -> Answer:
    async def answer(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(up.received) == 2:
            writer.transport.abort()
        else:
            writer.write(status)

    return answer


@pytest.mark.parametrize("is_at_once", [True, False])
def test_only_immediate_break_of_reused_connection_is_retried(is_at_once: bool) -> None:
    async def scenario() -> None:
        async with world(whole, fail_on_second_request()) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            await w.request(C, {"prompt": "x"})
            for server in w.servers:
                server.pool.round_trip_s = 10.0 if is_at_once else -10.0
            assert (await w.request(C, {"prompt": "x"})).status == 200
            assert [len(up.received) for up in w.ups] == ([0, 3] if is_at_once else [1, 2])

    run(scenario())


def test_non_idempotent_request_uses_a_new_connection() -> None:
    async def scenario() -> None:
        async with world(whole, fail_on_second_request()) as w:
            w.ups[1].keeps = True
            prefer(w, 1, 0)
            await w.request(C, {"prompt": "x"})
            for server in w.servers:
                server.pool.round_trip_s = 10.0
            response = await w.request("/v1/conversations", {})
            assert response.status == 503 and [len(up.received) for up in w.ups] == [0, 2]

    run(scenario())


@pytest.mark.parametrize("begins", [False, True])
def test_stream_that_kills_servers_is_limited_to_two(begins: bool) -> None:
    async def scenario() -> None:
        dies = by_path(
            begin=respond(head(200, TICKET), b": keep-alive\n", cut=True), resume=respond(cut=True)
        )
        async with world(dies, dies, dies, LOST if begins else dies) as w:
            prefer(w, 3, 2, 1, 0)
            response = await w.request(C, STREAM)
            assert "2 servers were lost" in response.body.decode()
            assert sum(bool(up.received) for up in w.ups) == 2

    run(scenario())


def test_rejected_resumption_is_not_retried_and_full_server_after_retry_after() -> None:
    async def scenario() -> None:
        async with world(
            by_path(resume=respond(head(429, b"retry-after: 60", kind=b"application/json") + b"{}")),
            by_path(resume=respond(head(400, kind=b"application/json") + b"{}")),
            LOST,
        ) as w:
            w.app._timeouts = ProxyTimeouts(0.2, 1.0)
            prefer(w, 2, 1, 0)
            response = await w.request(C, STREAM)
            assert "no server can resume" in response.body.decode()
            assert [len(up.received) for up in w.ups[:2]] == [1, 1]

    run(scenario())


def test_stream_of_draining_server_resumes_elsewhere() -> None:
    async def scenario() -> None:
        second = by_path(
            resume=respond(head(200, TICKET), event(1, "c3-d4") + DONE),
            begin=respond(head(200), event(0), DONE),
        )
        for said, expected in ((event(0), ["t0", "t1"]), (b"", ["t0"])):
            async with world(second, by_path(begin=respond(head(200, TICKET), said + ERROR + DONE))) as w:
                prefer(w, 1, 0)
                response = await w.request(C, STREAM)
                assert texts(response) == expected and b"error" not in response.body
        async with world(
            second, respond(head(200), ERROR + DONE)
        ) as w:  # no event with token ids: no other server could resume
            prefer(w, 1, 0)
            assert b"leaving" in (await w.request(C, STREAM)).body

    run(scenario())


def named(name: str, position: str, token: int | None = None, stream: str = "a1-b2") -> bytes:
    """Return a named event with the token ids that the router requests."""
    note = b"" if token is None else b": ids 0 [%d]\n" % token
    words = f'id: {stream}:{position}\nevent: {name}\ndata: {{"type":"{name}"}}\n\n'
    return note + words.encode()


DRAINING_EVENT = (
    b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"leaving"}}\n\n'
)


@pytest.mark.parametrize("is_killed", [True, False])
def test_messages_stream_resumes_elsewhere(is_killed: bool) -> None:
    async def scenario() -> None:
        first_part = [
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
        second = by_path(resume=respond(head(200, ticket), *rest))
        first = respond(head(200, ticket), *first_part, b"" if is_killed else DRAINING_EVENT, cut=is_killed)
        async with world(second, by_path(begin=first)) as w:
            prefer(w, 1, 0)
            response = await w.request("/v1/messages", STREAM)
            assert response.body == re.sub(rb": ids .*\n", b"", b"".join(first_part + rest))
            resumed = json.loads(w.ups[0].received[-1]["body"])
            assert (resumed["path"], resumed["position"], resumed["outputs"]) == (
                "/v1/messages",
                "1.1t",
                [[100]],
            )
            assert (resumed["seeds"], resumed["created"]) == ([7], 0)

    run(scenario())


@pytest.mark.parametrize("is_killed", [True, False])
def test_responses_stream_resumes_elsewhere_with_its_id(is_killed: bool) -> None:
    async def scenario() -> None:
        first_part = [
            named("response.created", "0.1+0+1"),
            named("response.output_text.delta", "1.5+3+0", 100),
        ]
        rest = [named("response.completed", "2e.9+6+4", 101, "c3-d4")]
        ticket, name = b"x-quintet-relay: 7.1700000000.resp_ab12", "resp_ab12"
        second = by_path(resume=respond(head(200, ticket), *rest))
        draining_event = b": withdrawn\nevent: response.failed\ndata: {}\n\n"
        first = respond(head(200, ticket), *first_part, b"" if is_killed else draining_event, cut=is_killed)
        async with world(second, by_path(begin=first)) as w:
            prefer(w, 1, 0)
            response = await w.request("/v1/responses", STREAM)
            assert response.body == re.sub(rb": ids .*\n", b"", b"".join(first_part + rest))
            resumed = json.loads(w.ups[0].received[-1]["body"])
            assert (resumed["path"], resumed["position"], resumed["outputs"]) == (
                "/v1/responses",
                "1.5+3+0",
                [[100]],
            )
            assert (resumed["seeds"], resumed["created"], resumed["name"]) == (
                [7],
                1_700_000_000,
                name,
            )

    run(scenario())


def test_other_error_of_messages_stream_is_passed_on() -> None:
    async def scenario() -> None:
        broken = DRAINING_EVENT.replace(b"overloaded_error", b"api_error")
        first_part = named("message_start", "0.0n")
        async with world(LOST, respond(head(200, b"x-quintet-relay: 7.0"), first_part, broken)) as w:
            prefer(w, 1, 0)
            assert (await w.request("/v1/messages", STREAM)).body == first_part + broken

    run(scenario())


def test_server_that_hangs_up_repeatedly_is_left() -> None:
    async def scenario() -> None:
        second = by_path(resume=respond(head(200, TICKET), event(1, "c3-d4") + DONE))
        hangs_up = by_path(
            begin=respond(head(200, TICKET), event(0), cut=True),
            rest=respond(head(200, TICKET), b": \n", cut=True),
        )
        async with world(second, hangs_up) as w:
            prefer(w, 1, 0)
            assert texts(await w.request(C, STREAM)) == ["t0", "t1"]
            assert len(w.ups[1].received) == 2

    run(scenario())


def test_stream_with_comments_only_is_retried() -> None:
    async def scenario() -> None:
        silent = respond(head(200, TICKET), b": keep-alive\n", cut=True)
        async with world(respond(head(200, TICKET), event(0) + DONE), silent) as w:
            prefer(w, 1, 0)
            assert (await w.request(C, STREAM)).body.startswith(b": keep-alive\nid: a1-b2:1\n")
        async with world(BUSY, silent) as w:
            prefer(w, 1, 0)
            assert b"answered with status 503" in (await w.request(C, STREAM)).body

    run(scenario())


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_events_end_as_their_server_ends_lines(end: bytes) -> None:
    async def scenario() -> None:
        said = (b"data: {}\n\n" + b"event: message_stop\ndata: {}\n\n").replace(b"\n", end)
        async with world(respond(head(200), said)) as w:
            assert (await w.request(M, STREAM)).body == said
        async with world(respond(head(200, b"content-length: 8"), b"data: {}")) as w:
            assert (await w.request(M, STREAM)).body == b"data: {}"

    run(scenario())
    relayed = Events(is_relayed=True)
    assert b"ids" not in relayed.take(event(0).replace(b"\n", b"\r\n"))
    assert relayed.take_resume_state() == ("a1-b2", "1", [[100]])


def test_event_ids_are_for_clients_that_read_them() -> None:
    async def scenario() -> None:
        async with world(respond(head(200, TICKET), event(0), event(1), DONE)) as w:
            assert b"id: " in (await w.request(C, STREAM)).body
            plain = (await w.request(C, STREAM, accept="*/*")).body
            assert plain.startswith(b"data: ") and b"id: " not in plain and plain.count(b"data: ") == 3

    run(scenario())
    events = Events(is_relayed=True, sends_ids=False)
    assert events.take(b": keep-alive\n" + event(0)).startswith(b": keep-alive\n\ndata: ")
    assert events.take_resume_state() == ("a1-b2", "1", [[100]])


def test_unterminated_event_is_bounded() -> None:
    events = Events(is_relayed=True)
    assert events.take(event(0))
    assert len(events.take(b"data: " + b"x" * MAX_EVENT_BYTES)) > MAX_EVENT_BYTES
    assert events.take_resume_state() is None


def test_stream_without_token_ids_is_not_resumed_elsewhere() -> None:
    events = Events(is_relayed=True)
    events.take(event(7))
    assert events.take_resume_state() == ("a1-b2", "8", None)


def test_hop_by_hop_headers_are_dropped() -> None:
    async def scenario() -> None:
        answer = respond(
            head(200, b"x-kept: 1", b"proxy-connection: a", b"x-hop: 1", b"connection: x-hop") + DONE
        )
        async with world(answer) as w:
            response = await w.request(
                C, STREAM, connection="keep-alive, X-Mine", x_mine="1", trailer="a", x_other="2"
            )
            assert not {"x-hop", "proxy-connection", "connection"} & response.headers.keys()
            assert response.headers["x-kept"] == "1"
            sent = w.ups[0].received[0]["headers"]
            assert not {"connection", "x-mine", "trailer"} & sent.keys() and sent["x-other"] == "2"
            assert json.loads(w.ups[0].received[0]["body"]) == STREAM

    run(scenario())


def test_resumed_stream_resumes_at_another_server() -> None:
    """The request carries its outputs; the server sends the token ids of events that another router passed on."""

    async def scenario() -> None:
        rest = by_path(
            begin=respond(head(200, TICKET), b": told 0 [100]\n\n: ids 0 [101]\n\n", event(2), cut=True)
        )
        second = by_path(resume=respond(head(200, TICKET), event(3, "c3-d4") + DONE))
        async with world(second, rest) as w:
            response = await w.request(C, STREAM, last_event_id="a1-b2:2")
            assert (
                texts(response) == ["t2", "t3"]
                and b": ids" not in response.body
                and b": told" not in response.body
            )
            resumed = json.loads(w.ups[0].received[-1]["body"])
            assert (resumed["position"], resumed["outputs"]) == ("3", [[100, 101, 102]])

    run(scenario())


def test_repeated_token_ids_are_not_counted_twice() -> None:
    """The server resumes after a hang-up and repeats its token ids. After its loss another server receives each token
    once.
    """

    async def scenario() -> None:
        again = respond(head(200, TICKET), b": told 0 [100,101]\n\n", event(2), cut=True)

        async def repeats_once(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            if len(up.received) == 2:
                await again(up, received, writer)
            else:
                writer.transport.abort()

        once = by_path(begin=respond(head(200, TICKET), event(0), event(1), cut=True), rest=repeats_once)
        second = by_path(resume=respond(head(200, TICKET), event(3, "c3-d4") + DONE))
        async with world(second, once) as w:
            assert texts(await w.request(C, STREAM)) == ["t0", "t1", "t2", "t3"]
            resumed = json.loads(w.ups[0].received[-1]["body"])
            assert (resumed["position"], resumed["outputs"]) == ("3", [[100, 101, 102]])

    run(scenario())


def test_long_replay_breaks_no_stream() -> None:
    notes = b"".join(replayed_comments(0, range(100_000, 300_000)))
    assert len(notes) > MAX_EVENT_BYTES
    events = Events(True)
    pieces = [notes[first : first + 65_536] for first in range(0, len(notes), 65_536)]
    assert not b"".join(map(events.take, pieces)).strip()
    assert events.take(b'id: a1-b2:200000\ndata: {"choices":[]}\n\n')
    again = events.take_resume_state()
    assert again is not None and again[2] == [list(range(100_000, 300_000))]
