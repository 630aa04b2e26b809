"""Ray Data batches and a Ray Serve application on a local Ray cluster of two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# The default of 5 s is too short on two busy cores.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from quintet.deploy.integrations.ray.batch import Completions
from quintet.deploy.integrations.ray.serving import application
from quintet.wire.errors import ConfigError

SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SMALL = {"kv_cache_memory": "64MiB", "max_model_len": 512}
PROMPTS = [f"def f{i}(x):" for i in range(24)]


def post(url: str, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def texts_of(url: str, prompts: list[str]) -> list[str]:
    answer = json.loads(post(f"{url}/v1/completions", {"prompt": prompts, **SAMPLING}))
    return [choice["text"] for choice in answer["choices"]]


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 90
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within 90 s"
        time.sleep(0.2)


class CompletionsWithNode(Completions):
    """Completions that add their node id. The first actor with `PROMPTS[5]` is killed during its batch."""

    def __init__(self, killed: str, **flags: Any) -> None:
        super().__init__(**flags)
        self._killed = Path(killed)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if PROMPTS[5] in batch["prompt"] and not self._killed.exists():
            self._killed.touch()
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
            super().__call__(batch)
            time.sleep(60)  # killed during the sleep: the batch is lost
        answered = super().__call__(batch)
        here = ray.get_runtime_context().get_node_id()
        return {**answered, "node": [here] * len(answered["text"])}


def check_batches(expected: list[str]) -> None:
    ray.data.DataContext.get_current().wait_for_min_actors_s = 120
    prompts = [*PROMPTS, "x " * 600]
    dataset = ray.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)])
    killed = Path("killed").absolute()
    rows = (
        dataset.repartition(8)
        .map_batches(
            CompletionsWithNode, fn_constructor_kwargs={"killed": str(killed), "sampling": SAMPLING, **SMALL},
            batch_size=4, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=2,
        )
        .take_all()
    )  # fmt: skip
    rows.sort(key=lambda row: row["id"])
    assert [row["text"] for row in rows[:-1]] == expected
    assert {row["num_tokens"] for row in rows[:-1]} == {12}
    assert (rows[-1]["finish_reason"], rows[-1]["text"]) == ("error", "") and "512" in rows[-1]["error"]
    assert len({row["node"] for row in rows}) == 2, "both actors were on one node"
    assert killed.exists() and len(rows) == len(prompts), "another actor computes the batch of the killed one"
    until(lambda: not servers(), "the exit of all engines, including that of the killed actor")
    print("ok: batches")


def servers() -> list[psutil.Process]:
    """Return the supervisors with a Ray process as parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            is_of_ray = parent is not None and "".join(parent.cmdline()[:1]).startswith("ray::")
            if is_of_ray and "".join(process.cmdline()[:1]).strip() == "quintet-supervisor":
                found.append(process)
    return found


def check_serve(expected: list[str]) -> None:
    try:
        application({"max_modle_len": 5})
    except ConfigError as error:
        assert "did you mean 'max_model_len'" in str(error)
    else:
        raise AssertionError("an unknown flag was accepted")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = {"served_model_name": "toy", "num_cpus": "0.5", **SMALL}
    serve.run(application(settings), route_prefix="/")
    url = f"http://127.0.0.1:{port}"
    assert texts_of(url, PROMPTS) == expected
    # On a busy machine one event has several tokens.
    longer = {"prompt": PROMPTS[0], **SAMPLING, "max_tokens": 240}
    [whole] = json.loads(post(f"{url}/v1/completions", longer))["choices"]
    assert whole["text"].startswith(expected[0])
    events = post(f"{url}/v1/completions", {**longer, "stream": True}).decode()
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(pieces) == whole["text"] and len(pieces) > 2, pieces
    try:
        post(f"{url}/v1/completions", {"prompt": "x", "temperature": -1})
    except urllib.error.HTTPError as error:
        assert error.code == 400 and "temperature" in error.read().decode()
    else:
        raise AssertionError("not refused")
    until(lambda: len(servers()) == 1, "one server, of one replica")
    [server] = servers()
    replica = server.parent()
    assert replica is not None
    replica.send_signal(signal.SIGKILL)
    until(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE,
        "the exit of a server without a replica",
    )

    def is_back() -> bool:
        try:
            return texts_of(url, PROMPTS[:2]) == expected[:2]
        except OSError:
            return False

    until(is_back, "another replica")
    serve.delete("default")
    check_drain(url)
    print("ok: serve")


def check_drain(url: str) -> None:
    """A stream longer than the default drain of a replica completes with a larger drain_timeout."""
    settings = {"executor": "mock", "step_ms": 100, "drain_timeout": 60, "num_cpus": "0.5", **SMALL}
    serve.run(application(settings), route_prefix="/")
    body = {"prompt": PROMPTS[0], **SAMPLING, "max_tokens": 480, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [answer.readline()]
        serve.delete("default", _blocking=False)
        lines += answer.readlines()
    events = [line[6:].decode().strip() for line in lines if line.startswith(b"data: ")]
    assert events[-1] == "[DONE]", events[-3:]
    reasons = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert reasons[-1] == "length" and time.monotonic() - started > 46, (
        reasons[-1],
        time.monotonic() - started,
    )
    until(lambda: not servers(), "the exit of the server after its replica")


def main(server: str, _model: str) -> None:
    expected = texts_of(server, PROMPTS)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, logging_level="WARNING")
    try:
        check_batches(expected)
        check_serve(expected)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


main(*sys.argv[1:3])
