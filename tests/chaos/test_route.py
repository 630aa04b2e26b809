"""`kill -9` of one of two servers behind a router: what it was answering goes on at the other, to the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from bench.chaos.streams import as_messages, crowd, differences, play

from tests.processes.server import Server, serve, wait_until

FLAGS: dict[str, list[tuple[str, ...]]] = {
    "mock": [("--executor", "mock", "--step-ms", "4")] * 2,
    "model": [("--kv-cache-memory", "64MiB")] * 2,
    "layouts": [
        ("--kv-cache-memory", "64MiB", "--layout-invariant", "--threads", "1", "--tensor-parallel-size", size)
        for size in ("2", "1")
    ],
}
"""Of the first server, which is killed, and of the second."""
LISTENING = re.compile(r"listening on (\S+) port (\d+)")


@contextlib.contextmanager
def route(*flags: str) -> Iterator[Server]:
    """Run ``quintet route`` on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quintet.deploy.cli", "route", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    router, is_ready = Server(process), threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            router.lines.append(line.rstrip())
            if match := LISTENING.search(line):
                router.url = f"http://{match[1]}:{match[2]}"
                is_ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert is_ready.wait(60), router.lines
        yield router
        assert router.stop() == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.whole
@pytest.mark.parametrize("kind", FLAGS)
def test_a_server_that_is_killed_changes_no_byte(kind: str) -> None:
    asked = crowd(1, 24, (60, 120)) + as_messages(crowd(2, 8, (60, 120)))
    of_first, of_second = ((*flags, "--max-model-len", "1024") for flags in FLAGS[kind])
    with (
        serve(*of_first) as first,
        serve(*of_second) as second,
        route("--engine", first.url, "--engine", second.url, "--poll-interval", "0.2") as router,
    ):
        wait_until(lambda: router.get("/readyz")[1].find('"servers":2') > 0, "both servers")
        calm = asyncio.run(play(router.url, asked))
        assert all(heard.status == 200 and heard.is_done and not heard.error for heard in calm.heard)
        assert all(heard.num_connections == 1 for heard in calm.heard)

        async def disturb() -> None:
            assert 0 < first.gauge("quintet:live_requests") < len(asked)
            first.process.kill()

        run = asyncio.run(play(router.url, asked, disturb))
        assert not differences(calm, run, asked)
        assert all(heard.num_connections == 1 for heard in run.heard), "no client had to come back"
        assert router.gauge("quintet_route:resumptions_total") > 0
        assert router.gauge("quintet_route:broken_streams_total") == 0
        assert router.gauge("quintet_route:server_up") == 1
