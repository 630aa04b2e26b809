"""`kill -9` of one of two servers of a router, and of one of two routers: the other resumes to the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.chaos.streams import (
    Run,
    StreamResult,
    as_messages,
    as_responses,
    differences,
    random_requests,
    run_requests,
    stream_request,
)

from tests.chaos.test_kills import assert_empty
from tests.processes.server import Server, route, serve, wait_until

FLAGS: dict[str, list[tuple[str, ...]]] = {
    "mock": [("--executor", "mock", "--step-ms", "4")] * 2,
    "model": [("--kv-cache-memory", "64MiB")] * 2,
    "layouts": [
        ("--kv-cache-memory", "64MiB", "--layout-invariant", "--threads", "1", "--tensor-parallel-size", size)
        for size in ("2", "1")
    ],
    "engines": [
        ("--kv-cache-memory", "64MiB", "--threads", "1", "--tensor-parallel-size", "2", *engines)
        for engines in (("--data-parallel-size", "2"), ())
    ],
}
"""Flags of the first server, which is killed, and of the second."""
ALONE = (*FLAGS["mock"][0], "--max-model-len", "1024")
SWITCHES = {"type": "array", "items": {"type": "boolean"}, "minItems": 90, "maxItems": 90}
LIGHTS = {
    "type": "function", "name": "lights", "strict": True,
    "parameters": {"type": "object", "properties": {"on": SWITCHES}, "required": ["on"]},
}  # fmt: skip
ITEMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "reasoning": (("--reasoning-parser", "deepseek_r1"), {}),
    "function_call": (("--tool-call-parser", "hermes"), {"tools": [LIGHTS], "tool_choice": "required"}),
}
"""Item type -> server flags and request fields that produce it."""


def await_servers(router: Server, number: int) -> None:
    """Wait until a router reports `number` healthy servers."""
    wait_until(lambda: f'"servers":{number}' in router.get("/readyz")[1], f"{number} servers")


@contextlib.contextmanager
def two_routers(
    of_first: tuple[str, ...], of_second: tuple[str, ...]
) -> Iterator[tuple[Server, Server, Server, Server]]:
    """Run two servers and two routers of both; yield all once the routers report both servers."""
    with serve(*of_first) as first, serve(*of_second) as second:
        flags = ("--engine", first.url, "--engine", second.url, "--poll-interval", "0.2")
        with route(*flags) as one, route(*flags) as other:
            for router in (one, other):
                await_servers(router, 2)
            yield first, second, one, other


def assert_reconnected(run: Run) -> None:
    """Check that clients of the killed router reconnected, some by stream id, some by request, and no other client."""
    affected = run.results[::2]
    assert all(result.num_connections == 1 for result in run.results[1::2]), (
        "clients of the other router reconnected"
    )
    assert any(result.num_connections > result.num_sent == 1 for result in affected), (
        "no client resumed a stream"
    )
    assert any(result.num_sent > 1 for result in affected), "no client resent its request"


@pytest.mark.whole
@pytest.mark.parametrize("kind", FLAGS)
def test_killed_server_keeps_all_bytes(kind: str) -> None:
    requests = (
        random_requests(1, 24, (60, 120))
        + as_messages(random_requests(2, 8, (60, 120)))
        + as_responses(random_requests(4, 8, (60, 120)))
    )
    of_first, of_second = ((*flags, "--max-model-len", "1024") for flags in FLAGS[kind])
    with (
        serve(*of_first) as first,
        serve(*of_second) as second,
        route("--engine", first.url, "--engine", second.url, "--poll-interval", "0.2") as router,
    ):
        await_servers(router, 2)
        reference = asyncio.run(run_requests(router.url, requests))
        assert all(
            result.status == 200 and result.is_done and not result.error for result in reference.results
        )
        assert all(result.num_connections == 1 for result in reference.results)

        async def disturb() -> None:
            assert 0 < first.gauge("quintet:live_requests") < len(requests)
            first.process.kill()

        run = asyncio.run(run_requests(router.url, requests, disturb))
        assert not differences(reference, run, requests)
        assert all(result.num_connections == 1 for result in run.results), "a client reconnected"
        assert router.gauge("quintet_route:resumptions_total") > 0
        assert router.gauge("quintet_route:broken_streams_total") == 0
        assert router.gauge("quintet_route:server_up") == 1


@pytest.mark.whole
@pytest.mark.parametrize("kind", FLAGS)
def test_killed_router_keeps_all_bytes(kind: str) -> None:
    """Each router has half of the clients. --max-num-seqs 4, so that most have no byte at the time of the kill."""
    requests = random_requests(3, 32, (60, 120))
    of_first, of_second = (
        (*flags, "--max-model-len", "1024", "--max-num-seqs", "4") for flags in FLAGS[kind]
    )
    with two_routers(of_first, of_second) as (first, second, one, other):
        reference = asyncio.run(run_requests(one.url, requests, other_urls=[other.url]))
        assert all(
            result.status == 200 and result.is_done and not result.error for result in reference.results
        )
        assert all(result.num_connections == 1 for result in reference.results)

        async def disturb() -> None:
            one.process.kill()

        def is_due(started: set[int]) -> bool:
            return any(number % 2 == 0 for number in started)

        run = asyncio.run(run_requests(one.url, requests, disturb, [other.url], is_due))
        assert not differences(reference, run, requests)
        assert_reconnected(run)
        wait_until(lambda: other.gauge("quintet_route:server_open_requests") == 0, "an idle router")
        for server in (first, second):
            assert_empty(server)


@pytest.mark.whole
def test_stream_survives_kills_of_its_server_and_then_its_router() -> None:
    """Kill the server, then the router once the other server has sent an event."""
    [request] = random_requests(5, 1, (300, 300), plain=True)
    with two_routers(ALONE, ALONE) as (first, second, one, other):
        reference, result = StreamResult(), StreamResult()
        asyncio.run(stream_request(one.url, request, reference))

        def disturb() -> None:
            if len(result.times_s) == 10:
                busy_server(first, second).process.kill()
            elif len(streams_of(result)) == 2:
                one.process.kill()

        asyncio.run(stream_request(one.url, request, result, disturb, [other.url]))
        assert result.bytes_of() == reference.bytes_of() and reference.is_done
        assert (len(streams_of(reference)), len(streams_of(result)), result.num_sent) == (1, 3, 1)


@pytest.mark.whole
def test_stream_survives_kills_of_its_router_and_then_its_server() -> None:
    """The client resends its request, so that the other router can resume it at another server."""
    [request] = random_requests(6, 1, (300, 300), plain=True)
    with two_routers(ALONE, ALONE) as (first, second, one, other):
        reference, result = StreamResult(), StreamResult()
        asyncio.run(stream_request(one.url, request, reference))

        def disturb() -> None:
            if len(result.times_s) == 10:
                one.process.kill()
            elif len(streams_of(result)) == 2 and not killed:
                killed.append(busy_server(first, second))
                killed[0].process.kill()

        killed: list[Server] = []
        asyncio.run(stream_request(one.url, request, result, disturb, [other.url], resend=True))
        assert result.bytes_of() == reference.bytes_of() and reference.is_done
        assert (len(streams_of(result)), result.num_sent, result.num_connections) == (3, 1, 2)
        assert other.gauge("quintet_route:broken_streams_total") == 0


@pytest.mark.whole
@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("how", ["killed", "drained"])
def test_response_items_resume_and_are_stored(kind: str, how: str) -> None:
    """Inside reasoning or the arguments of a call: same events, and the final server stores the response."""
    flags, fields = ITEMS[kind]
    requests = as_responses(random_requests(7, 8, (200, 300), plain=True), **fields)
    flags = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--drain-timeout", "0.1", *flags)
    with (
        serve(*flags) as first,
        serve(*flags) as second,
        route("--engine", first.url, "--engine", second.url, "--poll-interval", "0.2") as router,
    ):
        await_servers(router, 2)
        reference = asyncio.run(run_requests(router.url, requests))
        assert all(
            result.is_done and result.events[-2]["item"]["type"] == kind for result in reference.results
        )

        async def disturb() -> None:
            assert 0 < first.gauge("quintet:live_requests") < len(requests)
            if how == "killed":
                first.process.kill()
            else:
                first.process.terminate()

        def have_all_begun(started: set[int]) -> bool:
            return len(started) == len(requests)  # others would be resent, not resumed

        run = asyncio.run(run_requests(router.url, requests, disturb, is_due=have_all_begun))
        assert not differences(reference, run, requests)
        assert router.gauge("quintet_route:resumptions_total") > 0
        assert router.gauge("quintet_route:broken_streams_total") == 0
        for result in run.results:
            [name] = (name for name, ours in result.names.items() if ours == "own")
            status, kept = router.get(f"/v1/responses/resp_{name}")
            last = result.events[-1]["response"]
            assert (status, json.loads(kept)["status"]) == (200, last["status"])
            assert json.loads(kept)["usage"]["output_tokens"] == last["usage"]["output_tokens"]


@pytest.mark.whole
def test_response_resumes_after_a_restart_with_its_store(tmp_path: Path) -> None:
    """Only this server stores the previous response. After the restart, its store records that no client waits for it."""
    flags = (*ALONE, "--response-store", str(tmp_path / "kept.sqlite"))
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(serve(*flags))
        router = servers.enter_context(route("--engine", first.url, "--poll-interval", "0.2"))
        await_servers(router, 1)
        _, former = first.post("/v1/responses", {"input": "one", "max_output_tokens": 8})
        [request] = as_responses(
            random_requests(8, 1, (300, 300), plain=True), previous_response_id=former["id"]
        )
        reference = asyncio.run(run_requests(router.url, [request]))

        async def disturb() -> None:
            first.process.kill()
            again = serve(*flags, "--port", first.url.rpartition(":")[2])
            await asyncio.to_thread(servers.enter_context, again)

        run = asyncio.run(run_requests(router.url, [request], disturb))
        assert not differences(reference, run, [request])
        [result] = run.results
        [name] = (name for name, ours in result.names.items() if ours == "own")
        status, kept = router.get(f"/v1/responses/resp_{name}")
        assert (status, json.loads(kept)["status"]) == (200, "incomplete") and result.is_done


def busy_server(*servers: Server) -> Server:
    """Return the server with active requests."""
    [found] = [server for server in servers if server.gauge("quintet:live_requests")]
    return found


def streams_of(result: StreamResult) -> set[str]:
    """Return the stream ids that a client received: one per start or resumption at a server."""
    return {event_id.partition(":")[0] for event_id in result.event_ids}
