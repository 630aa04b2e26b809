"""Kills of processes of a model on two hosts, and a cut link between them: all responses stay the same.

Hosts are two addresses of this machine, or two network namespaces with a veth pair where these are permitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from bench.chaos.streams import random_requests, run_requests

from tests.chaos.test_drafts import draft_flags, write_mimo
from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.processes.server import Server, serve, wait_until
from tests.processes.test_disaggregation import free_port

pytestmark = pytest.mark.whole
"""`tests.executor.distributed.test_host_processes` kills ranks of another host without a server."""


@dataclass
class Group:
    """A server and its second host."""

    server: Server
    other: subprocess.Popen[bytes]
    command: list[str]
    prefix: list[str]

    def process_on_other_host(self, title: str) -> psutil.Process:
        """Wait for a process of the other host and return it."""
        found: list[psutil.Process] = []

        def is_started() -> bool:
            found[:] = [child for child in self._children() if title in " ".join(child.cmdline()[:1])]
            return bool(found)

        wait_until(is_started, title, 60)
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
def group(flags: list[str], prefix: list[str] | None = None, of_first: Sequence[str] = ()) -> Iterator[Group]:
    """Start both hosts. prefix: prefix of the other host's command. of_first: further flags of the first host."""
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
        with serve(*little_memory("model", 8), *COMMON, *flags, *of_first) as server:
            both = Group(server, other, command, prefix or [])
            try:
                yield both
            finally:
                other = both.other
    finally:
        other.terminate()
        assert other.wait(30) == 0, "the other host exits with 0 after SIGTERM"


@pytest.mark.parametrize(("stages", "size"), [(2, 1), (2, 2), (4, 1), (1, 2), (1, 4)])
def test_kill_of_each_process_keeps_all_bytes(stages: int, size: int, tmp_path: Path) -> None:
    requests = random_requests(1, 6, (20, 40))
    with group(flags_of(tmp_path, "127.0.0.2", stages, size)) as both:
        reference = asyncio.run(run_requests(both.server.url, requests))
        assert all(
            result.status == 200 and result.is_done and not result.error for result in reference.results
        )

        async def rank() -> None:
            both.process_on_other_host("-rank-").kill()

        async def member() -> None:
            both.process_on_other_host("quintet-host-1").kill()

        async def hub() -> None:
            title = "quintet-executor-0-hub"
            wait_until(lambda: title in both.server.children(), title)
            both.server.children()[title].kill()

        async def first() -> None:
            kill(both.server, "executor")

        async def kill_host() -> None:
            both.end_other()
            await asyncio.sleep(1.0)
            both.start_other()

        for disturb in (rank, member, hub, first, kill_host):
            assert_same(
                both.server,
                reference,
                asyncio.run(run_requests(both.server.url, requests, disturb)),
                requests,
            )


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_kills_with_drafts_keep_all_bytes(method: str, tmp_path: Path) -> None:
    requests = random_requests(4, 6, (40, 80))
    (tmp_path / "model").mkdir()
    model = write_mimo(tmp_path / "model")
    memory = ("--kv-cache-memory", "24MiB")
    with serve(model, *COMMON, *memory) as plain:
        reference = asyncio.run(run_requests(plain.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)
    of_first = (*memory, *draft_flags(method, tmp_path / "draft"))
    with group([model, *flags_of(tmp_path, "127.0.0.2")], of_first=of_first) as both:

        async def nothing() -> None:
            pass

        async def rank() -> None:
            both.process_on_other_host("-rank-").kill()

        async def first() -> None:
            kill(both.server, "executor")

        for disturb in (nothing, rank, first):
            run = asyncio.run(run_requests(both.server.url, requests, disturb))
            assert_same(both.server, reference, run, requests)
            both.server.await_metrics()
            if disturb is nothing:  # a restarted executor may have few tokens left
                assert both.server.gauge("quintet:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize(("stages", "size"), [(2, 1), (1, 2)])
def test_stalled_rank_of_the_other_host_is_replaced(stages: int, size: int, tmp_path: Path) -> None:
    requests = random_requests(3, 8, (40, 60))
    with group(flags_of(tmp_path, "127.0.0.2", stages, size)) as both:
        reference = asyncio.run(run_requests(both.server.url, requests))

        async def disturb() -> None:
            both.process_on_other_host("-rank-").send_signal(signal.SIGSTOP)

        assert_same(
            both.server, reference, asyncio.run(run_requests(both.server.url, requests, disturb)), requests
        )


@contextlib.contextmanager
def veth_pair() -> Iterator[list[str]]:
    """Connect a second network namespace; this end is 10.213.0.1. Yield the command prefix for the other."""
    name, near_end, far_end = (f"quintet{os.getpid()}", f"qa{os.getpid()}", f"qb{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("network namespaces are not permitted")
    try:
        ip("link", "add", near_end, "type", "veth", "peer", "name", far_end)
        ip("link", "set", far_end, "netns", name)
        ip("addr", "add", "10.213.0.1/24", "dev", near_end)
        ip("link", "set", near_end, "up")
        ip("-n", name, "addr", "add", "10.213.0.2/24", "dev", far_end)
        ip("-n", name, "link", "set", far_end, "up")
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", near_end], check=False, capture_output=True)
        ip("netns", "del", name)


def test_cut_link_delays_streams(tmp_path: Path) -> None:
    """No process dies and no connection is closed; only the stall timeout detects the cut."""
    requests = random_requests(4, 6, (40, 60))
    with veth_pair() as prefix, group(flags_of(tmp_path, "10.213.0.1"), prefix) as both:
        reference = asyncio.run(run_requests(both.server.url, requests))

        async def disturb() -> None:
            near_end = f"qa{os.getpid()}"
            subprocess.run(["ip", "link", "set", near_end, "down"], check=True)
            await asyncio.sleep(4.0)  # twice --stall-timeout
            subprocess.run(["ip", "link", "set", near_end, "up"], check=True)

        assert_same(
            both.server, reference, asyncio.run(run_requests(both.server.url, requests, disturb)), requests
        )
        assert any("host 1 sent nothing for 2 s" in line for line in both.server.lines)
