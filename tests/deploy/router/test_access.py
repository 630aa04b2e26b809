"""The router's door: whom it lets through to its servers, and whose accounts it keeps."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
from typing import Any

import pytest
from tests.deploy.router.test_router import C, Upstream, event, head, run, says, whole, world

from quintet.deploy.cli.route import add_parser, cors_config
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import Servers
from quintet.wire.errors import RequestError


def test_nothing_of_the_servers_is_told_without_a_key() -> None:
    """What a server tells everybody, it tells for the router's key here."""

    async def story() -> None:
        async with world(whole, keys=("k",), servers_key="inner") as w:
            for path in ("/health", "/ping", "/v2/health/ready", "/openapi.json", "/docs", "/docs/x.js"):
                assert (await w.ask(path, None, "GET")).status == 401, path
            assert (await w.ask("/docs/../v1/completions", {})).status == 401
            for path in ("/docs/../v1/completions", "/./v1/completions", "/v1/completions/.."):
                assert (await w.ask(path, {}, x_api_key="k")).status == 400, path
            assert not w.ups[0].asked
            for path in ("/livez", "/readyz"):
                assert (await w.ask(path, None, "GET")).status == 200

    run(story())


def test_servers_get_their_own_key_in_the_place_of_a_clients() -> None:
    async def story() -> None:
        async with world(whole, keys=("k",), servers_key="inner") as w:
            await w.ask(C, {}, authorization="Bearer k", x_api_key="other")
            assert w.ups[0].asked[0]["headers"]["authorization"] == "Bearer inner"
            assert "x-api-key" not in w.ups[0].asked[0]["headers"]
        async with world(whole, keys=("k",)) as w:
            await w.ask(C, {}, authorization="Bearer k")
            assert w.ups[0].asked[0]["headers"]["authorization"] == "Bearer k"

    run(story())


def test_a_key_is_one_account_however_it_is_sent() -> None:
    async def story() -> None:
        async with world(whole, limits=(0, 3), keys=("k",)) as w:
            spellings = (
                {"authorization": "Bearer k"},
                {"authorization": "bearer  k"},
                {"authorization": "Basic 1", "x_api_key": "k"},
                {"authorization": "Basic 2", "x_api_key": "k"},
            )
            statuses = [(await w.ask(C, {}, **headers)).status for headers in spellings]
            assert statuses == [200, 200, 200, 429]

    run(story())


def test_accounts_do_not_grow_while_the_oldest_is_open() -> None:
    limits = Limits(2, 5, lambda: 0.0, max_idle=10)
    held = limits.enter(b"first")
    for number in range(100):
        limits.leave(limits.enter(b"%d" % number))
    assert len(limits) == 11
    limits.enter(b"first")
    with pytest.raises(RequestError, match="at most 2 are allowed"):
        limits.enter(b"first")
    limits.leave(held)
    limits.leave(limits.enter(b"first"))
    unlimited = Limits(0, 0, lambda: 0.0)
    unlimited.leave(unlimited.enter(b"a"))
    unlimited.enter(b"b")
    assert len(unlimited) == 0


def test_a_client_that_leaves_is_no_longer_counted() -> None:
    async def story() -> None:
        async with world(whole, limits=(1, 0), keys=("k",)) as w:

            async def endless(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    writer.write(head(200) + event(0))
                    while True:
                        writer.write(b": keep-alive\n")
                        await writer.drain()
                        await asyncio.sleep(0.01)

            w.ups[0].answer = endless
            await w.ask(C, {"prompt": "x", "stream": True}, leaves=True, x_api_key="k")
            w.ups[0].answer = whole
            assert (await w.ask(C, {}, x_api_key="k")).status == 200

    run(story())


def test_who_ends_takes_nothing_new_on_connections_that_are_open() -> None:
    async def story() -> None:
        async with world(whole) as w:
            w.app.is_draining = True
            told = await w.ask(C, {})
            assert (told.status, told.headers["connection"]) == (503, "close") and not w.ups[0].asked
            assert (await w.ask("/livez", None, "GET")).status == 200

    run(story())


def test_routers_agree_on_the_server_of_a_session() -> None:
    """Whatever the order in which they came to know the servers."""
    urls = [f"http://10.0.0.{number}:8000" for number in range(1, 5)]
    chosen = []
    for listed in (urls, urls[::-1]):
        servers = Servers("session")
        servers.set_urls(listed, 1.0)
        for server in servers:
            server.set_trouble("")
        held = [servers.choose(RequestSummary(session=f"s{number}"), ()) for number in range(40)]
        chosen.append([each.server.url for each in held if each is not None])
    assert chosen[0] == chosen[1] and len(set(chosen[0])) == 4


def test_bodies_of_open_requests_have_one_budget() -> None:
    """They are kept to be sent again; whoever would exceed it may try later, and nobody who is alone is refused."""

    async def story() -> None:
        may_answer, came = asyncio.Event(), asyncio.Event()

        async def waits(up: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            came.set()
            await may_answer.wait()
            await whole(up, asked, writer)

        async with world(waits) as w:
            w.app._policy.bodies.max_open_bytes = 3000
            first = asyncio.create_task(w.ask(C, {"prompt": "x" * 2000}))
            await came.wait()
            told = await w.ask(C, {"prompt": "y" * 2000})
            assert told.status == 503 and b"limit of 3000" in told.body and told.headers["retry-after"] == "1"
            assert b"held_body_bytes 2014.0" in (await w.ask("/metrics", None, "GET")).body
            may_answer.set()
            assert (await first).status == 200
            assert (await w.ask(C, {"prompt": "z" * 4000})).status == 200
            assert w.app._policy.bodies.num_retained_bytes == 0

    run(story())


def test_what_clients_send_in_odd_ways_reaches_servers_plainly() -> None:
    """Servers may read neither compressed bodies nor paths with empty segments."""

    async def story() -> None:
        packed = gzip.compress(b'\xef\xbb\xbf{"prompt": "x"}')
        async with world(whole) as w:
            assert (await w.ask("//v1/completions/", packed, content_encoding="gzip")).status == 200
            [asked] = w.ups[0].asked
            assert (asked["path"], asked["body"]) == (C, b'{"prompt": "x"}')
            assert "content-encoding" not in asked["headers"]
            assert (await w.ask("/livez/", None, "GET")).body == b"ok"

    run(story())


def test_the_router_says_which_pages_may_read_its_answers() -> None:
    async def story() -> None:
        of_server = head(200, b"access-control-allow-origin: https://a", kind=b"application/json")
        async with world(says(of_server, b"{}")) as w:
            told = await w.ask(C, {}, origin="https://b")
            assert told.status == 200 and "access-control-allow-origin" not in told.headers

    run(story())


def test_pages_of_all_origins_may_ask_a_router_unless_configured_otherwise() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    words = ["route", "--engine", "http://a:1"]
    open_to_all = cors_config(parser.parse_args(words))
    assert (open_to_all.allowed_origins, open_to_all.allow_credentials) == (["*"], False)
    closed = cors_config(parser.parse_args([*words, "--allowed-origins", "[]"]))
    assert closed.allowed_origins == []
    named = cors_config(
        parser.parse_args([*words, "--allowed-origins", "https://a", "--allowed-methods", '["GET"]'])
    )
    assert (named.allowed_origins, named.allowed_methods) == (["https://a"], ["GET"])


def test_old_names_of_router_flags_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    words = ["--engines-at", "http://a", "--engine-dns", "http://b", "--apart-from", "7"]
    arguments = parser.parse_args(["route", *words])
    assert (arguments.engine_dns, arguments.pd_min_tokens) == (["http://a", "http://b"], 7)
    assert caplog.messages == [
        "--engines-at is deprecated; use --engine-dns",
        "--apart-from is deprecated; use --pd-min-tokens",
    ]
