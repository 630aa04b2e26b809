"""Responses of /health with working, idle, busy, stalled and dead processes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from tests.processes.server import Server, serve, wait_until

MOCK = ("--executor", "mock", "--max-model-len", "1024", "--kv-cache-memory", "64MiB")


def health(server: Server, path: str = "/health") -> tuple[int, dict[str, object]]:
    status, body = server.get(path)
    return status, json.loads(body)


def named(answer: dict[str, object]) -> list[str]:
    processes = answer["processes"]
    assert isinstance(processes, list)
    return [process["process"] for process in processes]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["executor", "core", "tokenizer", "detokenizer"])
def test_stalled_process_is_reported_and_replaced(role: str) -> None:
    with serve(*MOCK, "--stall-timeout", "5") as server:
        victim = server.children()[f"quintet-{role}-0"]
        assert health(server)[0] == 200
        victim.send_signal(signal.SIGSTOP)
        answers: list[tuple[int, list[str]]] = []

        def is_unhealthy() -> bool:
            status, answer = health(server)
            answers.append((status, named(answer)))
            return status == 503

        wait_until(is_unhealthy, "503")
        assert answers[-1] == (503, [f"{role}-0.1"])
        assert server.get("/readyz")[0] == 503
        assert server.get("/livez")[0] == 200
        wait_until(lambda: health(server)[0] == 200, "recovery")
        assert not victim.is_running()
        text = "\n".join(server.lines)
        assert f"{role}-0.1: no heartbeat" in text
        assert "Fatal Python error: Aborted" in text
        status, completion = server.post("/v1/completions", {"prompt": "again", "max_tokens": 3})
        assert status == 200, completion


def test_long_step_is_no_stall() -> None:
    with serve(*MOCK, "--step-ms", "6000", "--stall-timeout", "3") as server:
        ended = threading.Event()

        def ask() -> None:
            server.post("/v1/completions", {"prompt": "long", "max_tokens": 1})
            ended.set()

        asking = threading.Thread(target=ask)
        asking.start()
        reported: set[str] = set()
        while not ended.wait(0.2):
            reported.update(named(health(server)[1]))
        asking.join()
        assert not reported & {"executor-0.1", "core-0.1"}
        everyone = health(server, "/health?verbose")[1]["all_processes"]
        assert isinstance(everyone, list)
        assert {process["restarts"] for process in everyone} == {0}
        assert server.gauge("quintet:executor_steps_total") <= 2, (
            "a step for the request, and at most one more"
        )


def test_verbose_health_lists_all_processes() -> None:
    with serve(*MOCK, "--tokenizers", "2") as server:
        server.children()["quintet-detokenizer-0"].kill()
        wait_until(lambda: "detokenizer-0.2" in server.get("/health?verbose")[1], "a replacement")
        wait_until(lambda: health(server)[0] == 200, "recovery")
        _, answer = health(server, "/health?verbose")
        everyone = answer["all_processes"]
        assert isinstance(everyone, list)
        by_name = {process["process"]: process for process in everyone}
        assert by_name.keys() == {
            "executor-0.1", "core-0.1", "tokenizer-0.1", "tokenizer-1.1", "detokenizer-0.2", "frontend-0.1",
        }  # fmt: skip
        assert by_name["detokenizer-0.2"]["restarts"] == 1
        assert by_name["detokenizer-0.2"]["epoch"] == 2
        for process in everyone:
            assert process["state"] == "ready"
            assert psutil.pid_exists(process["pid"])
            assert 0 <= process["heartbeat_age_s"] < 30
        assert "all_processes" not in health(server)[1]


def test_stopped_supervisor_is_reported() -> None:
    with serve(*MOCK) as server:
        assert health(server)[0] == 200
        server.process.send_signal(signal.SIGSTOP)
        status, answer = health(server)
        server.process.send_signal(signal.SIGCONT)
        assert (status, named(answer)) == (503, ["supervisor"])
        assert server.get("/livez")[0] == 200
        wait_until(lambda: health(server)[0] == 200, "recovery")
        assert "aborting it" not in "\n".join(server.lines), "no other process was stopped"


def test_restart_limit_is_a_one_line_error() -> None:
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "serve", "--port", "0", "--no-standby", *MOCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("Quintet is ready" in line for line in process.stdout)
        server = psutil.Process(process.pid)
        killed: set[int] = set()

        def kill_the_next() -> bool:
            for child in server.children():
                with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor ends all children
                    if child.pid not in killed and "detokenizer" in "".join(child.cmdline()):
                        killed.add(child.pid)
                        child.kill()
            return process.poll() is not None

        wait_until(kill_the_next, "the exit of the supervisor")
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 1
        last = [line for line in errors.splitlines() if line.startswith("quintet: ")]
        assert len(last) == 1
        assert re.fullmatch(
            r"quintet: detokenizer 0: died 6 times within 60 s, giving up; last: .*SIGKILL.*", last[0]
        )
