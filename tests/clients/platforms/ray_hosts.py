"""A model on two nodes of a local Ray cluster, in stages or ranks: streams survive kills, no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="qr-")  # also for the nodes, to find leftover files
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from quintet.deploy import embedded
from quintet.deploy.supervisor import run_dirs

FOLDER = Path(os.environ["TMPDIR"])
PROMPT = "def fibonacci(n):"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": True}
DEADLINE_S = 150.0
READY = re.compile(r"Quintet is ready: (\S+)")
STAGES = ("--pipeline-parallel-size", "2")
"""One stage per host."""
RANKS = ("--tensor-parallel-size", "2")
"""One rank per host, one stage."""
NODE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}


def open_stream(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=DEADLINE_S)


def text_of(url: str) -> str:
    with open_stream(url, BODY) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def streamed(url: str, disturb: Callable[[], None]) -> str:
    """Return the text of a stream; call `disturb` after its first events."""
    pieces: list[str] = []
    with open_stream(url, {**BODY, "stream": True}) as events:
        for line in events:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            pieces += [choice["text"] for choice in event["choices"]]
            if len(pieces) == 5:
                disturb()
    return "".join(pieces)


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.1)


def named(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and "".join(process.cmdline()[:1]).startswith(title):
                found.append(process)
    return found


class Server:
    """`quintet serve` on this node of the cluster."""

    def __init__(self, *flags: str, layout: tuple[str, str] = STAGES, cwd: Path | None = None) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quintet.deploy.cli.main", "serve", "--port", "0", "--nnodes", "2"),
                *(*layout, "--distributed-executor-backend", "ray"),
                *("--kv-cache-memory", "8MiB", "--master-port", str(free_port()), *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def printed(self) -> str:
        return "\n".join(self.lines)

    def url(self) -> str:
        """Wait for the ready line; return the URL."""
        until(lambda: self.process.poll() is not None or READY.search(self.printed()) is not None, "the boot")
        found = READY.search(self.printed())
        assert found, self.printed()
        return found[1]

    def failed_start(self) -> str:
        """Wait for a failed start; return the output."""
        status = self.process.wait(DEADLINE_S)
        self.reader.join(10)
        assert status == 78, self.printed()
        return self.printed()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def keys() -> list[Path]:
    return list(FOLDER.glob("*/group.key"))


def num_groups() -> int:
    return sum(1 for group in placement_group_table().values() if group["state"] != "REMOVED")


def is_clean() -> bool:
    """Return True if no actor, host, placement group or server is left, except the reference server."""
    titles = ("ray::Host", "quintet-host", "quintet-ray")
    return not any(map(named, titles)) and not run_dirs.claimed(FOLDER) and num_groups() == 0


def check_refusals(cluster: Cluster, model: Path) -> None:
    assert re.search(r"--nnodes 2: .* the cluster has 1: .* add nodes", Server().failed_start())
    (FOLDER / "other").mkdir()
    (FOLDER / "other" / "quintet.py").write_text("")
    other = cluster.add_node(**NODE, env_vars={"PYTHONPATH": str(FOLDER / "other")})
    words = Server().failed_start()
    assert re.search(
        r"ray: host 1: its node cannot run it \(ModuleNotFoundError: No module named 'quintet", words
    ), words
    cluster.remove_node(other)
    cluster.add_node(**NODE)
    assert re.search(r"needs 3 CPUs of its node.*; lower --threads", Server("--threads", "3").failed_start())
    # The folder exists at the server, not at the actor.
    words = Server("/proc/self/cwd/model", cwd=model.parent).failed_start()
    assert re.search(r"ray: host 1, on \S+: MODEL '/proc/self/cwd/model': folder not found", words), words
    until(is_clean, "a clean cluster after failed starts")
    until(lambda: not keys(), "no key after failed starts")
    print("ok: refusals")


def check_key(server: Server) -> None:
    """The key is a private file on both hosts, and in no command line or output."""
    found = keys()
    assert len(found) == 2 and len({path.read_bytes() for path in found}) == 1, found
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    secret = found[0].read_bytes()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert secret.hex() not in " ".join(process.cmdline())
    assert secret.hex() not in server.printed()


def kill(title: str) -> Callable[[], None]:
    def do() -> None:
        [process] = named(title)
        process.kill()

    return do


def check_disturbances(server: Server, expected: str, disturbances: dict[str, Callable[[], None]]) -> None:
    url = server.url()
    assert text_of(url) == expected
    for what, disturb in disturbances.items():
        began = time.monotonic()
        assert streamed(url, disturb) == expected, what
        print(f"ok: {what} killed, {time.monotonic() - began:.1f} s")
        until(lambda: len(named("quintet-host-1")) == 1, "the replacement host")


def check_end(server: Server) -> None:
    """SIGTERM ends the server and leaves no process."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.printed()
    until(is_clean, "a clean cluster after SIGTERM")
    assert keys() == []


@contextlib.contextmanager
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(address=cluster.address, logging_level="WARNING", log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(server: str, _model: str) -> None:
    expected = text_of(server)
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"
    assert "cannot connect to a Ray cluster" in Server().failed_start()
    model = FOLDER / "there" / "model"
    shutil.copytree(embedded.default_model_path(), model)
    with nodes() as cluster:
        check_refusals(cluster, model)

        def lose_node() -> None:
            [node] = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(**NODE)

        servers = [first := Server()]
        try:
            first.url()
            check_key(first)
            actor = {"actor": kill("ray::Host"), "driver": kill("quintet-ray")}
            host = {"member": kill("quintet-host-1"), "node": lose_node}
            check_disturbances(first, expected, actor | host)
            check_end(first)
            servers.append(ranks := Server(layout=RANKS))
            # Ranks sum in another order than one process.
            check_disturbances(
                ranks, text_of(ranks.url()), {"rank": kill("quintet-executor-0-rank-1")} | host
            )
            check_end(ranks)
            servers.append(second := Server())
            assert text_of(second.url()) == expected
            second.process.kill()
            second.process.wait()
            until(is_clean, "a clean cluster after a kill")
            assert len(keys()) == 1, "the key of the killed server, which the next server removes"
        except BaseException:
            print(servers[-1].printed())
            raise
        finally:
            for each in servers:
                each.process.kill()
    print("ok: the end")


try:
    main(*sys.argv[1:3])
finally:
    shutil.rmtree(FOLDER, ignore_errors=True)
