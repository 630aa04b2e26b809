"""Processes of a model on two hosts are killed, and the way between them is cut: no client sees another byte.

Hosts are network namespaces with a cable between them where that is allowed, else two addresses of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from bench.chaos.streams import crowd, play

from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import free_port

pytestmark = pytest.mark.whole
"""`tests.executor.distributed.test_host_processes` kills ranks of another host without a server."""


@dataclass
class Group:
    """A server, and its other host."""

    server: Server
    other: subprocess.Popen[bytes]
    command: list[str]
    prefix: list[str]

    def of_other(self, title: str) -> psutil.Process:
        """Return a process of the other host, once it is there."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [child for child in self._children() if title in " ".join(child.cmdline()[:1])]
            return bool(found)

        wait_until(is_there, title, 60)
        return found[0]

    def _children(self) -> Iterator[psutil.Process]:
        for child in psutil.Process(self.other.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline():
                    yield child

    def start_other(self) -> None:
        self.other = subprocess.Popen(self.prefix + self.command)

    def end_other(self) -> None:
        for child in [*self._children(), psutil.Process(self.other.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.other.wait()


def flags_of(folder: Path, address: str, stages: int = 2, size: int = 1) -> list[str]:
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    return [
        *("--nnodes", "2", "--pipeline-parallel-size", str(stages), "--tensor-parallel-size", str(size), "--threads", "1"),
        *("--master-addr", address, "--master-port", str(free_port()), "--group-key", str(key)),
    ]  # fmt: skip


@contextlib.contextmanager
def group(flags: list[str], prefix: list[str] | None = None) -> Iterator[Group]:
    """Start both. prefix: of the other host's command."""
    command = [
        sys.executable,
        "-m",
        "quintet.deploy.cli.main",
        "serve",
        *flags,
        "--node-rank",
        "1",
        "--headless",
    ]
    other = subprocess.Popen((prefix or []) + command)
    try:
        with serve(*little_memory("model", 8), *COMMON, *flags) as server:
            both = Group(server, other, command, prefix or [])
            try:
                yield both
            finally:
                other = both.other
    finally:
        other.terminate()
        assert other.wait(30) == 0, "the other host leaves when it is told to"


@pytest.mark.parametrize(("stages", "size"), [(2, 1), (2, 2), (4, 1), (1, 2), (1, 4)])
def test_whoever_is_killed_changes_no_byte(stages: int, size: int, tmp_path: Path) -> None:
    asked = crowd(1, 6, (20, 40))
    with group(flags_of(tmp_path, "127.0.0.2", stages, size)) as both:
        calm = asyncio.run(play(both.server.url, asked))
        assert all(heard.status == 200 and heard.is_done and not heard.error for heard in calm.heard)

        async def rank() -> None:
            both.of_other("-rank-").kill()

        async def member() -> None:
            both.of_other("quintet-host-1").kill()

        async def hub() -> None:
            title = "quintet-executor-0-hub"
            wait_until(lambda: title in both.server.children(), title)
            both.server.children()[title].kill()

        async def first() -> None:
            kill(both.server, "executor")

        async def whole_host() -> None:
            both.end_other()
            await asyncio.sleep(1.0)
            both.start_other()

        for disturb in (rank, member, hub, first, whole_host):
            assert_same(both.server, calm, asyncio.run(play(both.server.url, asked, disturb)), asked)


@pytest.mark.parametrize(("stages", "size"), [(2, 1), (1, 2)])
def test_a_rank_of_the_other_host_that_stops_is_noticed(stages: int, size: int, tmp_path: Path) -> None:
    asked = crowd(3, 8, (40, 60))
    with group(flags_of(tmp_path, "127.0.0.2", stages, size)) as both:
        calm = asyncio.run(play(both.server.url, asked))

        async def disturb() -> None:
            both.of_other("-rank-").send_signal(signal.SIGSTOP)

        assert_same(both.server, calm, asyncio.run(play(both.server.url, asked, disturb)), asked)


@contextlib.contextmanager
def cable() -> Iterator[list[str]]:
    """Lay one between two network namespaces, this one's end at 10.213.0.1; yield the words that run a command in the other."""
    name, here, there = (f"quintet{os.getpid()}", f"qa{os.getpid()}", f"qb{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there)
        ip("link", "set", there, "netns", name)
        ip("addr", "add", "10.213.0.1/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "addr", "add", "10.213.0.2/24", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", here], check=False, capture_output=True)
        ip("netns", "del", name)


def test_a_cut_link_is_a_pause(tmp_path: Path) -> None:
    """Nobody dies, and no connection is closed: silence alone tells."""
    asked = crowd(4, 6, (40, 60))
    with cable() as prefix, group(flags_of(tmp_path, "10.213.0.1"), prefix) as both:
        calm = asyncio.run(play(both.server.url, asked))

        async def disturb() -> None:
            here = f"qa{os.getpid()}"
            subprocess.run(["ip", "link", "set", here, "down"], check=True)
            await asyncio.sleep(4.0)  # twice --stall-timeout
            subprocess.run(["ip", "link", "set", here, "up"], check=True)

        assert_same(both.server, calm, asyncio.run(play(both.server.url, asked, disturb)), asked)
        assert any("host 1 sent nothing for 2 s" in line for line in both.server.lines)
