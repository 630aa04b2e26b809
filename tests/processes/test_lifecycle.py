"""Start, scaling, drain and restart of processes, with the mock executor."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes.server import Server, serve, wait_until

MOCK = ("--executor", "mock", "--max-model-len", "1024", "--kv-cache-memory", "64MiB")


def stream(server: Server, body: dict[str, object]) -> Generator[dict[str, object], None, None]:
    """Yield the decoded events of one streamed completion."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    try:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])
    finally:
        answer.close()
        connection.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """Server that several tests share."""
    with serve(*MOCK, "--step-ms", "5") as server:
        yield server


def test_roles_scale_independently() -> None:
    with serve(*MOCK, "--frontends", "2", "--tokenizers", "3", "--detokenizers", "2") as server:
        titles = sorted(server.children())
        assert [t for t in titles if "frontend" in t] == ["quintet-frontend-0", "quintet-frontend-1"]
        assert len([t for t in titles if "-tokenizer" in t]) == 3
        assert len([t for t in titles if "detokenizer" in t]) == 2
        texts: list[str] = []

        def ask() -> None:
            for _ in range(8):
                status, answer = server.post(
                    "/v1/completions", {"prompt": "same", "max_tokens": 9, "seed": 5}
                )
                assert status == 200
                texts.append(answer["choices"][0]["text"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 32
        assert len(set(texts)) == 1


def test_sigterm_drains_streams() -> None:
    with serve(*MOCK, "--step-ms", "20") as server:
        events = stream(server, {"prompt": "drain me", "max_tokens": 40, "ignore_eos": True})
        next(events)
        server.process.send_signal(signal.SIGTERM)
        rest = list(events)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert server.process.wait(30) == 0


def test_second_signal_skips_the_drain() -> None:
    with serve(*MOCK, "--step-ms", "200") as server:
        children = server.children()
        with contextlib.closing(
            stream(server, {"prompt": "never mind", "max_tokens": 500, "ignore_eos": True})
        ) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: any("drain" in line.lower() for line in server.lines), "the log line of the drain"
            )
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) != 0
        _gone, alive = psutil.wait_procs(list(children.values()), 30)
        assert alive == []


def test_children_end_with_the_supervisor() -> None:
    with serve(*MOCK) as server:
        children = list(server.children().values())
        assert len(children) == 5
        server.process.kill()
        _gone, alive = psutil.wait_procs(children, 30)
        assert alive == []


@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "core", "executor", "frontend"])
def test_killed_child_is_replaced(shared_server: Server, role: str) -> None:
    victim = shared_server.children()[f"quintet-{role}-0"]
    victim.kill()

    def is_replaced() -> bool:
        child = shared_server.children().get(f"quintet-{role}-0")
        return child is not None and child.pid != victim.pid

    wait_until(is_replaced, f"a new {role}")
    wait_until(lambda: shared_server.get("/readyz")[0] == 200, "readiness")
    status, answer = shared_server.post("/v1/completions", {"prompt": "hello again", "max_tokens": 4})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def test_failed_boot_names_the_file(tmp_path: Path) -> None:
    from quintet.deploy.embedded import default_model_path

    broken = tmp_path / "model"
    broken.mkdir()
    for file in default_model_path().iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = subprocess.run(
        [sys.executable, "-m", "quintet.deploy.cli.main", "serve", str(broken), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode != 0
    output = run.stdout + run.stderr
    assert re.search(r"executor", output)
    assert "model.safetensors" in output
    assert "Quintet is ready" not in output


def test_used_port_is_a_one_line_error(shared_server: Server) -> None:
    port = shared_server.url.rsplit(":", 1)[1]
    run = subprocess.run(
        [sys.executable, "-m", "quintet.deploy.cli.main", "serve", *MOCK, "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert port in run.stderr + run.stdout
    assert "Traceback" not in run.stderr


def test_stream_interval_batches_tokens(shared_server: Server) -> None:
    body = {
        "prompt": "count",
        "max_tokens": 11,
        "ignore_eos": True,
        "stream_interval": 4,
        "return_token_ids": True,
    }
    choices = [event["choices"][0] for event in stream(shared_server, body)]  # type: ignore[index]
    sizes = [
        len(choice["token_ids"]) for choice in choices if "token_ids" in choice
    ]  # without the prompt's event
    assert sum(sizes) == 11
    assert all(size >= 4 for size in sizes[1:-1])
    assert len(sizes) <= 4
