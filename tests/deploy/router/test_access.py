"""Router access: API keys, limits, and request headers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
from typing import Any

import pytest
from tests.deploy.router.test_router import C, Upstream, event, head, respond, run, whole, world

from quintet.deploy.cli.route import add_parser, cors_config
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import Servers
from quintet.wire.errors import RequestError


def test_server_paths_need_a_key() -> None:
    """Paths that a server opens to all clients need the router's key."""

    async def scenario() -> None:
        async with world(whole, keys=("k",), servers_key="inner") as w:
            for path in ("/health", "/ping", "/v2/health/ready", "/openapi.json", "/docs", "/docs/x.js"):
                assert (await w.request(path, None, "GET")).status == 401, path
            assert (await w.request("/docs/../v1/completions", {})).status == 401
            for path in ("/docs/../v1/completions", "/./v1/completions", "/v1/completions/.."):
                assert (await w.request(path, {}, x_api_key="k")).status == 400, path
            assert not w.ups[0].received
            for path in ("/livez", "/readyz"):
                assert (await w.request(path, None, "GET")).status == 200

    run(scenario())


def test_servers_receive_their_own_key() -> None:
    async def scenario() -> None:
        async with world(whole, keys=("k",), servers_key="inner") as w:
            await w.request(C, {}, authorization="Bearer k", x_api_key="other", api_key="third")
            assert w.ups[0].received[0]["headers"]["authorization"] == "Bearer inner"
            assert not {"x-api-key", "api-key"} & w.ups[0].received[0]["headers"].keys()
        async with world(whole, keys=("k",)) as w:
            await w.request(C, {}, authorization="Bearer k")
            assert w.ups[0].received[0]["headers"]["authorization"] == "Bearer k"

    run(scenario())


def test_key_has_one_account_in_every_spelling() -> None:
    async def scenario() -> None:
        async with world(whole, limits=(0, 3), keys=("k",)) as w:
            spellings = (
                {"authorization": "Bearer k"},
                {"authorization": "bearer  k"},
                {"authorization": "Basic 1", "x_api_key": "k"},
                {"authorization": "Basic 2", "x_api_key": "k"},
            )
            statuses = [(await w.request(C, {}, **headers)).status for headers in spellings]
            assert statuses == [200, 200, 200, 429]

    run(scenario())


def test_number_of_accounts_is_bounded() -> None:
    limits = Limits(2, 5, lambda: 0.0, max_idle=10)
    held = limits.begin_request(b"first")
    for number in range(100):
        limits.end_request(limits.begin_request(b"%d" % number))
    assert len(limits) == 11
    limits.begin_request(b"first")
    with pytest.raises(RequestError, match="at most 2 are allowed"):
        limits.begin_request(b"first")
    limits.end_request(held)
    limits.end_request(limits.begin_request(b"first"))
    unlimited = Limits(0, 0, lambda: 0.0)
    unlimited.end_request(unlimited.begin_request(b"a"))
    unlimited.begin_request(b"b")
    assert len(unlimited) == 0


def test_disconnected_client_is_not_counted() -> None:
    async def scenario() -> None:
        async with world(whole, limits=(1, 0), keys=("k",)) as w:

            async def endless(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    writer.write(head(200) + event(0))
                    while True:
                        writer.write(b": keep-alive\n")
                        await writer.drain()
                        await asyncio.sleep(0.01)

            w.ups[0].answer = endless
            await w.request(C, {"prompt": "x", "stream": True}, disconnects=True, x_api_key="k")
            w.ups[0].answer = whole
            assert (await w.request(C, {}, x_api_key="k")).status == 200

    run(scenario())


def test_draining_router_rejects_new_requests_on_open_connections() -> None:
    async def scenario() -> None:
        async with world(whole) as w:
            w.app.is_draining = True
            response = await w.request(C, {})
            assert (response.status, response.headers["connection"]) == (503, "close") and not w.ups[
                0
            ].received
            assert (await w.request("/livez", None, "GET")).status == 200

    run(scenario())


def test_routers_agree_on_session_affinity() -> None:
    """The order in which the routers learned of the servers has no effect."""
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


def test_open_request_bodies_share_one_budget() -> None:
    """Bodies are kept for retries. A request that exceeds the budget is answered with 503; a lone request never is."""

    async def scenario() -> None:
        may_answer, arrived = asyncio.Event(), asyncio.Event()

        async def waits(up: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            arrived.set()
            await may_answer.wait()
            await whole(up, received, writer)

        async with world(waits) as w:
            w.app._policy.bodies.max_open_bytes = 3000
            first = asyncio.create_task(w.request(C, {"prompt": "x" * 2000}))
            await arrived.wait()
            response = await w.request(C, {"prompt": "y" * 2000})
            assert (
                response.status == 503
                and b"limit of 3000" in response.body
                and response.headers["retry-after"] == "1"
            )
            assert b"held_body_bytes 2014.0" in (await w.request("/metrics", None, "GET")).body
            may_answer.set()
            assert (await first).status == 200
            assert (await w.request(C, {"prompt": "z" * 4000})).status == 200
            assert w.app._policy.bodies.num_retained_bytes == 0

    run(scenario())


def test_requests_are_normalized_for_servers() -> None:
    """Servers need read neither compressed bodies nor paths with empty segments."""

    async def scenario() -> None:
        packed = gzip.compress(b'\xef\xbb\xbf{"prompt": "x"}')
        async with world(whole) as w:
            assert (await w.request("//v1/completions/", packed, content_encoding="gzip")).status == 200
            [received] = w.ups[0].received
            assert (received["path"], received["body"]) == (C, b'{"prompt": "x"}')
            assert "content-encoding" not in received["headers"]
            assert (await w.request("/livez/", None, "GET")).body == b"ok"

    run(scenario())


def test_configured_cors_origins() -> None:
    async def scenario() -> None:
        of_server = head(200, b"access-control-allow-origin: https://a", kind=b"application/json")
        async with world(respond(of_server, b"{}")) as w:
            response = await w.request(C, {}, origin="https://b")
            assert response.status == 200 and "access-control-allow-origin" not in response.headers

    run(scenario())


def test_all_cors_origins_are_allowed_by_default() -> None:
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
