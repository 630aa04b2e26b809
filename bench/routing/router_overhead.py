"""Overhead of `quintet route`: time to the first byte of a response, and streamed events per second on one core.

    python -m bench.routing.router_overhead [--repetitions 3] [--save FILE]

One process has two stub servers on the first processor. They respond in the format of Quintet's servers with X-Quintet-Relay:
events with ids, and tokens in comments. The router has the second processor; the client shares the first.

``first``: short sequential requests, alternating between a server and the router. The overhead is the difference at the same
percentile. ``slow_ms`` is the total excess over the median of routed requests that took twice the median. ``waited_ms`` is the
time in which the router was runnable but not running (Linux, /proc/PID/schedstat). If both are equal, other processes cause the
tail.

``events``: parallel streams, with one write per event. The rate divides events by the router's CPU seconds, so other load on the
machine has little effect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import httptools
import msgspec
import psutil
import uvloop

from bench.overhead.run import Machine, _commit, machine
from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ConnectionPool, ask
from quintet.deploy.tools.load_client.load import Load, run_load

STREAMS, EVENTS, TICK_S = 256, 200, 0.005
NUM_SHORT = 3000
NUM_WARMUPS = 300
BODY = msgspec.json.encode({"prompt": "x" * 400, "max_tokens": 16, "stream": True})
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-stream-id: 1-2\r\n"
    b"x-quintet-relay: 7.1700000000\r\n\r\n"
)
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


class StubServer(asyncio.Protocol):
    """Connection of a stub server: one event for a chat, `EVENTS` for a completion, at intervals of `TICK_S`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Store the path."""
        self._path = url

    def on_message_complete(self) -> None:
        """Send the response."""
        write = self._transport.write
        if self._path in (b"/readyz", b"/metrics"):
            write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(METRICS), METRICS))
            return
        write(HEAD)
        self._next(0, 1 if b"chat" in self._path else EVENTS)

    def _next(self, number: int, count: int) -> None:
        write = self._transport.write
        event = (
            b': ids 0 [%d]\nid: 1-2:%d\ndata: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
            b'"model":"toy","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
        ) % (1000 + number, number + 1)
        write(b"%x\r\n%b\r\n" % (len(event), event))
        if number + 1 < count:
            asyncio.get_running_loop().call_later(TICK_S, self._next, number + 1, count)
        else:
            write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def run_stub_servers(ports: multiprocessing.Queue[int]) -> None:
    """Serve on two free ports until the process is killed; put the ports into the queue."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(StubServer, "127.0.0.1", 0) for _ in range(2)]
        for server in servers:
            ports.put(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    uvloop.run(serve())


@contextlib.contextmanager
def serve_routed() -> Iterator[tuple[list[int], int, psutil.Process]]:
    """Run two stub servers and a router; yield the servers' ports, the router's port, and its process."""
    context = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = context.Queue()
    servers = context.Process(target=run_stub_servers, args=(ports,), daemon=True)
    servers.start()
    found = [ports.get(timeout=30) for _ in range(2)]
    flags = [flag for port in found for flag in ("--engine", f"http://127.0.0.1:{port}")]
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "route", "--port", "0", *flags]
    router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    os.sched_setaffinity(router.pid, {max(os.sched_getaffinity(0))})
    try:
        assert router.stderr is not None
        port = next(int(match[1]) for line in router.stderr if (match := re.search(r"port (\d+)", line)))
        while ask(Target.parse(f"http://127.0.0.1:{port}"), "GET", "/readyz").status != 200:
            time.sleep(0.05)
        yield found, port, psutil.Process(router.pid)
    finally:
        router.kill()
        router.wait()
        servers.kill()
        servers.join()


class Figures(msgspec.Struct):
    """Results of one repetition."""

    direct_p50_ms: float
    direct_p99_ms: float
    routed_p50_ms: float
    routed_p99_ms: float
    added_p99_ms: float
    slow_ms: float
    waited_ms: float
    events: int
    wall_s: float
    router_cpu_s: float
    events_per_cpu_s: float


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    repetitions: list[Figures]


def measure_latency(server_port: int, router_port: int) -> tuple[list[float], list[float]]:
    """Return latencies in milliseconds of short requests, alternately sent to a server and to the router."""

    async def run() -> tuple[list[float], list[float]]:
        targets = [Target.parse(f"http://127.0.0.1:{port}") for port in (server_port, router_port)]
        pools = [ConnectionPool(target) for target in targets]
        latencies_ms: tuple[list[float], list[float]] = ([], [])
        for number in range(NUM_WARMUPS + NUM_SHORT):
            for pool, target, times in zip(pools, targets, latencies_ms, strict=True):
                began_s = time.perf_counter()
                await pool.exchange(target.request("POST", "/v1/chat/completions", BODY))
                if number >= NUM_WARMUPS:
                    times.append(1e3 * (time.perf_counter() - began_s))
        for pool in pools:
            await pool.close()
        return latencies_ms

    return uvloop.run(run())


def waited_ms(pid: int) -> float:
    """Return the time in which a process was runnable but not running, in milliseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e6


def measure() -> Figures:
    """Run one repetition."""
    with serve_routed() as (servers, port, router):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        waited_before_ms = waited_ms(router.pid)
        server_port, router_port = measure_latency(servers[0], port)
        waited = waited_ms(router.pid) - waited_before_ms
        target = Target.parse(f"http://127.0.0.1:{port}")
        before, began_s = router.cpu_times(), time.perf_counter()
        run = run_load(Load(target, "/v1/completions", [BODY] * (2 * STREAMS), STREAMS))
        wall_s, after = time.perf_counter() - began_s, router.cpu_times()
        assert all(outcome.failure is None for outcome in run.outcomes), run.outcomes[0].message
        cpu_s = after.user + after.system - before.user - before.system
    events = 2 * STREAMS * (EVENTS + 1)
    median_ms = median(router_port)
    slow_ms = sum(latencies_ms - median_ms for latencies_ms in router_port if latencies_ms > 2 * median_ms)
    p99 = [quantiles(times, n=100)[98] for times in (server_port, router_port)]
    return Figures(
        round(median(server_port), 3),
        round(p99[0], 3),
        round(median(router_port), 3),
        round(p99[1], 3),
        round(p99[1] - p99[0], 3),
        round(slow_ms, 1),
        round(waited, 1),
        events,
        round(wall_s, 3),
        round(cpu_s, 3),
        round(events / cpu_s),
    )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    affinity, found = os.sched_getaffinity(0), []
    for _ in range(arguments.repetitions):
        os.sched_setaffinity(0, affinity)
        found.append(measure())
        print(found[-1], flush=True)
    os.sched_setaffinity(0, affinity)
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), found)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
