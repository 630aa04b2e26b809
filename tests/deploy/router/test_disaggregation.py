"""The router before servers with roles: whose prompt is computed elsewhere, what the two are sent, and what where one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.deploy.router.test_router import Answer, C, M, Upstream, World, head, run, says, world

from quintet.deploy.router.metrics import parse_metrics

LONG = {"prompt": "word " * 200, "max_tokens": 20, "n": 1, "min_tokens": 2, "stream": False, "seed": 5}
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.5", "remote_port": 5600}
OK = head(kind=b"application/json")
COMPUTED = says(OK, json.dumps({"kv_transfer_params": PARAMS}).encode())
ANSWERED = says(OK, b'{"answered":true}')


@contextlib.asynccontextmanager
async def pair(
    prefill: Answer, decode: Answer, roles: tuple[str, str] = ("prefill", "decode"), *, is_busy: bool = True
) -> AsyncIterator[World]:
    """Run a server that computes prompts and one that answers, which has something else to answer, and a router."""
    async with world(prefill, decode, pd_min_tokens=100) as w:
        for server, role in zip(w.servers, roles, strict=True):
            w.servers.note_role(server, role)
        if is_busy:
            w.servers.hold([*w.servers][1])
        yield w


def bodies(up: Upstream) -> list[dict[str, Any]]:
    return [json.loads(asked["body"]) for asked in up.asked]


def test_a_long_prompt_is_computed_by_one_and_answered_by_another() -> None:
    async def story() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            told = await w.ask(C, LONG)
            assert (told.status, told.body) == (200, b'{"answered":true}')
            first = {"prompt": LONG["prompt"], "max_tokens": 1, "stream": False, "seed": 5}
            assert bodies(w.ups[0]) == [first | {"kv_transfer_params": {"do_remote_decode": True}}]
            assert bodies(w.ups[1]) == [LONG | {"kv_transfer_params": PARAMS}]
            assert [(server.num_open, server.num_queued) for server in w.servers] == [(0, 0), (1, 0)]
            assert b'quintet_route:apart_total{computed="true"} 1' in w.app._metrics.text()

    run(story())


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
def test_where_that_is_no_help_a_request_is_sent_as_it_came(path: str, changed: dict[str, Any]) -> None:
    async def story() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            assert (await w.ask(path, LONG | changed)).status == 200
            assert not w.ups[0].asked and bodies(w.ups[1]) == [LONG | changed]
            assert [server.num_open for server in w.servers] == [0, 1]

    run(story())


def test_who_comes_back_for_an_answer_has_no_prompt_computed() -> None:
    async def story() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            await w.ask(C, LONG, last_event_id="a1-b2:3")
            assert not w.ups[0].asked

    run(story())


def test_who_answers_nobody_else_computes_the_prompt_too() -> None:
    async def story() -> None:
        async with pair(COMPUTED, ANSWERED, is_busy=False) as w:
            await w.ask(C, LONG)
            assert not w.ups[0].asked and bodies(w.ups[1]) == [LONG]

    run(story())


def test_no_prompt_waits_where_many_do() -> None:
    async def story() -> None:
        async with pair(COMPUTED, ANSWERED) as w:
            w.servers.hold(next(iter(w.servers)), num_queued=100_000)
            await w.ask(C, LONG)
            assert not w.ups[0].asked

    run(story())


@pytest.mark.parametrize(
    "prefill",
    [
        says(cut=True),
        says(head(503, kind=b"application/json"), b"{}"),
        says(OK, b'{"kv_transfer_params":null}'),
        says(OK, b"nonsense"),
    ],
    ids=["lost", "refused", "nothing", "nonsense"],
)
def test_what_nobody_computed_is_sent_as_it_came(prefill: Answer) -> None:
    async def story() -> None:
        async with pair(prefill, ANSWERED) as w:
            assert (await w.ask(C, LONG)).body == b'{"answered":true}'
            assert bodies(w.ups[1]) == [LONG]
            assert b'quintet_route:apart_total{computed="false"} 1' in w.app._metrics.text()
            assert [server.num_open for server in w.servers] == [0, 1]

    run(story())


def test_params_that_are_refused_are_left_out() -> None:
    async def decode(_: Upstream, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        is_refused = b"kv_transfer_params" in asked["body"]
        status = head(400, kind=b"application/json") if is_refused else OK
        writer.write(status + b'{"answered":true}')

    async def story() -> None:
        async with pair(COMPUTED, decode) as w:
            assert (await w.ask(C, LONG)).status == 200
            assert bodies(w.ups[1]) == [LONG | {"kv_transfer_params": PARAMS}, LONG]

    run(story())


def test_a_request_that_servers_are_lost_of_is_not_sent_to_a_third() -> None:
    async def story() -> None:
        async with world(says(cut=True), says(cut=True), ANSWERED, pd_min_tokens=100) as w:
            for server, role in zip(w.servers, ("prefill", "decode", "decode"), strict=True):
                w.servers.note_role(server, role)
                w.servers.hold(server)
            w.servers.hold([*w.servers][2], num_queued=1000)
            assert (await w.ask(C, LONG)).status == 503
            assert not w.ups[2].asked

    run(story())


def test_who_computes_prompts_gets_other_requests_only_where_nobody_else_is() -> None:
    async def story() -> None:
        async with pair(ANSWERED, ANSWERED) as w:
            for _ in range(3):
                await w.ask(C, {"prompt": "short"})
            assert not w.ups[0].asked
            [*w.servers][1].set_trouble("gone")
            assert (await w.ask(C, {"prompt": "short"})).status == 200
            assert len(w.ups[0].asked) == 1
            [*w.servers][1].set_trouble("")
            w.servers.note_role(next(iter(w.servers)), "")
            for _ in range(4):
                await w.ask(C, {"prompt": "other"})
            assert len(w.ups[0].asked) > 1, "it has no role any more"

    run(story())


def test_servers_say_what_they_do() -> None:
    figures = (
        '# HELP\nquintet:kv_peers_info{role="core",duty="prefill"} 1.0\nvllm:num_requests_running{a="b"} 2\n'
    )
    assert parse_metrics(figures).role == "prefill"
    assert parse_metrics("vllm:num_requests_running 2\n").role == ""
