"""Disaggregated prefill and decode in the router: prefill routing, transfer parameters, lost servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.deploy.router.test_router import Answer, C, M, Upstream, World, head, respond, run, world

from quintet.deploy.router.metrics import parse_metrics

LONG = {"prompt": "word " * 200, "max_tokens": 20, "n": 1, "min_tokens": 2, "stream": False, "seed": 5}
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.5", "remote_port": 5600}
OK = head(kind=b"application/json")
COMPUTED = respond(OK, json.dumps({"kv_transfer_params": PARAMS}).encode())
ANSWERED = respond(OK, b'{"answered":true}')


@contextlib.asynccontextmanager
async def pair(
    prefill: Answer, decode: Answer, roles: tuple[str, str] = ("prefill", "decode"), *, is_busy: bool = True
) -> AsyncIterator[World]:
    """Run a prefill server, a decode server that is busy, and a router."""
    async with world(prefill, decode, pd_min_tokens=100) as w:
        for server, role in zip(w.servers, roles, strict=True):
            w.servers.note_role(server, role)
        if is_busy:
            w.servers.hold([*w.servers][1])
        yield w


def bodies(up: Upstream) -> list[dict[str, Any]]:
    return [json.loads(received["body"]) for received in up.received]


def test_long_prompt_is_prefilled_by_prefill_server() -> None:
    async def scenario() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            response = await w.request(C, LONG)
            assert (response.status, response.body) == (200, b'{"answered":true}')
            first = {"prompt": LONG["prompt"], "max_tokens": 1, "stream": False, "seed": 5}
            assert bodies(w.ups[0]) == [first | {"kv_transfer_params": {"do_remote_decode": True}}]
            assert bodies(w.ups[1]) == [LONG | {"kv_transfer_params": PARAMS}]
            assert [(server.num_open, server.num_queued) for server in w.servers] == [(0, 0), (1, 0)]
            assert b'quintet_route:apart_total{computed="true"} 1' in w.app._metrics.text()

    run(scenario())


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        (C, {"prompt": "short"}),
        (C, {"prompt": [LONG["prompt"], "b"]}),
        (C, {"use_beam_search": True}),
        (C, {"prompt_logprobs": 1}),
        (C, {"kv_transfer_params": PARAMS}),
        (M, {}),
    ],
)
def test_request_without_benefit_is_sent_unchanged(path: str, changed: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            assert (await w.request(path, LONG | changed)).status == 200
            assert not w.ups[0].received and bodies(w.ups[1]) == [LONG | changed]
            assert [server.num_open for server in w.servers] == [0, 1]

    run(scenario())


def test_resumed_request_skips_prefill_server() -> None:
    async def scenario() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            await w.request(C, LONG, last_event_id="a1-b2:3")
            assert not w.ups[0].received

    run(scenario())


def test_idle_decode_server_prefills_itself() -> None:
    async def scenario() -> None:
        async with pair(COMPUTED, ANSWERED, is_busy=False) as w:
            await w.request(C, LONG)
            assert not w.ups[0].received and bodies(w.ups[1]) == [LONG]

    run(scenario())


def test_queue_at_prefill_server_is_avoided() -> None:
    async def scenario() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            w.servers.hold(next(iter(w.servers)), num_queued=100_000)
            await w.request(C, LONG)
            assert not w.ups[0].received

    run(scenario())


@pytest.mark.parametrize(
    "prefill",
    [
        respond(cut=True),
        respond(head(503, kind=b"application/json"), b"{}"),
        respond(OK, b'{"kv_transfer_params":null}'),
        respond(OK, b"nonsense"),
    ],
    ids=["lost", "refused", "nothing", "nonsense"],
)
def test_failed_prefill_sends_request_unchanged(prefill: Answer) -> None:
    async def scenario() -> None:
        async with pair(prefill, ANSWERED) as w:
            assert (await w.request(C, LONG)).body == b'{"answered":true}'
            assert bodies(w.ups[1]) == [LONG]
            assert b'quintet_route:apart_total{computed="false"} 1' in w.app._metrics.text()
            assert [server.num_open for server in w.servers] == [0, 1]

    run(scenario())


def test_rejected_transfer_params_are_dropped() -> None:
    async def decode(_: Upstream, received: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        is_refused = b"kv_transfer_params" in received["body"]
        status = head(400, kind=b"application/json") if is_refused else OK
        writer.write(status + b'{"answered":true}')

    async def scenario() -> None:
        async with pair(COMPUTED, decode) as w:
            assert (await w.request(C, LONG)).status == 200
            assert bodies(w.ups[1]) == [LONG | {"kv_transfer_params": PARAMS}, LONG]

    run(scenario())


def test_request_that_kills_two_servers_is_not_retried() -> None:
    async def scenario() -> None:
        async with world(respond(cut=True), respond(cut=True), ANSWERED, pd_min_tokens=100) as w:
            for server, role in zip(w.servers, ("prefill", "decode", "decode"), strict=True):
                w.servers.note_role(server, role)
                w.servers.hold(server)
            w.servers.hold([*w.servers][2], num_queued=1000)
            assert (await w.request(C, LONG)).status == 503
            assert not w.ups[2].received

    run(scenario())


def test_prefill_server_decodes_only_without_decode_servers() -> None:
    async def scenario() -> None:
        async with pair(ANSWERED, ANSWERED) as w:
            for _ in range(3):
                await w.request(C, {"prompt": "short"})
            assert not w.ups[0].received
            [*w.servers][1].set_trouble("gone")
            assert (await w.request(C, {"prompt": "short"})).status == 200
            assert len(w.ups[0].received) == 1
            [*w.servers][1].set_trouble("")
            w.servers.note_role(next(iter(w.servers)), "")
            for _ in range(4):
                await w.request(C, {"prompt": "other"})
            assert len(w.ups[0].received) > 1, "server has no role now"

    run(scenario())


def test_roles_are_read_from_metrics() -> None:
    figures = (
        '# HELP\nquintet:kv_peers_info{role="core",duty="prefill"} 1.0\nvllm:num_requests_running{a="b"} 2\n'
    )
    assert parse_metrics(figures).role == "prefill"
    assert parse_metrics("vllm:num_requests_running 2\n").role == ""
