"""`quintet admin` on a real server with active streams."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.server import Server, serve, wait_until
from tests.processes.test_lifecycle import MOCK, stream

NUM_STREAMS = 8
NUM_TOKENS = 150


def admin(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "admin", "--port", port, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*MOCK, "--step-ms", "10", "--tokenizers", "2") as server:
        yield server


def request(number: int) -> dict[str, object]:
    return {
        "prompt": f"stream {number}", "max_tokens": NUM_TOKENS, "seed": number, "temperature": 0.7, "ignore_eos": True,
    }  # fmt: skip


def text_of(server: Server, number: int, began: threading.Event) -> str:
    """Return the text of one stream; fail on an error event."""
    parts, finish = [], None
    for event in stream(server, request(number)):
        assert "error" not in event, event
        choice = event["choices"][0]  # type: ignore[index]
        parts.append(choice["text"])
        finish = choice["finish_reason"] or finish
        began.set()
    assert finish == "length"
    return "".join(parts)


class Load:
    """`NUM_STREAMS` concurrent streams, repeated until `end`; records their texts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_STREAMS)]
        self._began = [threading.Event() for _ in range(NUM_STREAMS)]
        self.texts: list[tuple[int, str]] = []
        self.failures: list[BaseException] = []
        for thread in self._threads:
            thread.start()
        for began in self._began:
            assert began.wait(30), "the stream did not start"

    def _run(self, number: int) -> None:
        try:
            while not self._stopping.is_set():
                self.texts.append((number, text_of(self._server, number, self._began[number])))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failures.append(error)
            self._began[number].set()

    def end(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures, self.failures
        assert len(self.texts) >= NUM_STREAMS


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[int, str]:
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        numbers = range(NUM_STREAMS)
        return dict(
            enumerate(threads.map(lambda number: text_of(server, number, threading.Event()), numbers))
        )


@pytest.mark.drawn(2)
@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "frontend", "executor", "core"])
def test_role_restart_under_load_keeps_texts(server: Server, undisturbed: dict[int, str], role: str) -> None:
    before = {title: child.pid for title, child in server.children().items() if f"-{role}-" in title}
    load = Load(server)
    answer = admin(server, "restart", role)
    load.end()
    assert answer.returncode == 0, answer.stderr
    assert f"done: restart {role}" in answer.stdout
    after = {title: child.pid for title, child in server.children().items() if f"-{role}-" in title}
    assert len(after) == len(before)
    assert not set(before.values()) & set(after.values())
    for number, text in load.texts:
        assert text == undisturbed[number]
    wait_until(lambda: server.get("/health")[0] == 200, "a healthy server")


def test_scaling_roles_under_load_keeps_texts(server: Server, undisturbed: dict[int, str]) -> None:
    load = Load(server)
    up = admin(server, "scale", "detokenizers=3", "tokenizers=3", "frontends=2", "engines=2")
    down = admin(server, "scale", "detokenizers=1", "tokenizers=1", "frontends=1", "engines=1")
    load.end()
    assert (up.returncode, down.returncode) == (0, 0), up.stderr + down.stderr
    for number, text in load.texts:
        assert text == undisturbed[number]
    roles = [title.split("-")[1] for title in server.children()]
    assert sorted(roles) == ["core", "detokenizer", "executor", "frontend", "tokenizer"]
    wait_until(lambda: server.get("/health")[0] == 200, "a healthy server")


def test_status_lists_all_processes(server: Server) -> None:
    answer = admin(server, "status")
    assert answer.returncode == 0
    head, titles, *rows = answer.stdout.splitlines()
    assert head.endswith("serving")
    assert titles.split()[:3] == ["process", "state", "pid"]
    pids = {str(child.pid) for child in server.children().values()}
    assert {row.split()[2] for row in rows} == pids


def test_unused_port_is_a_one_line_error(server: Server) -> None:
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "admin", "--port", "1", "status"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 78
    assert answer.stderr.count("\n") == 1
    assert "listens on port 1" in answer.stderr
