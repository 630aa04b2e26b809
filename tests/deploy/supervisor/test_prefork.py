"""Preforked children boot, fail and end like children started as programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.deploy.supervisor.supervised import HERE, World, kill, make_config, wait_gone, world

FORKS = {"forks": True}
ALL = {"executor-0.1", "core-0.1", "tokenizer-0.1", "detokenizer-0.1", "frontend-0.1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as held:
        yield held


def test_forked_children_take_the_slots(server: World) -> None:
    process = server.start(options=FORKS)
    server.expect("all_ready")
    pids = server.pids()
    assert pids.keys() == ALL
    assert all(os.getpgid(pid) == pid for pid in pids.values()), "Ctrl-C in a terminal must not reach them"
    assert {psutil.Process(pid).ppid() for pid in pids.values()} == {process.pid}
    listeners = {event["me"] for event in server.seen if event["event"] == "born" and event["listens"]}
    assert listeners == {"frontend-0.1"}
    process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    wait_gone(list(pids.values()))


@pytest.mark.parametrize("program", ["quintet.deploy.cli.serve", "quintet.deploy.supervisor.__main__"])
def test_imports_before_forking_start_no_threads(program: str) -> None:
    code = f"import os, {program}; print(len(os.listdir('/proc/self/task')))"
    printed = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    assert printed == "1\n", "numpy or another module started threads; no process is forked"


def test_only_a_frontend_holds_the_port(server: World) -> None:
    server.start(options=FORKS)
    port = server.expect("listening")["port"]
    server.expect("all_ready")
    holders = {
        me
        for me, pid in server.pids().items()
        if any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in psutil.Process(pid).net_connections("tcp")
        )
    }
    assert holders == {"frontend-0.1"}


def test_further_processes_of_a_role_are_programs(server: World) -> None:
    server.start(config=make_config(server.run_dir, frontends=2, tokenizers=2), options=FORKS)
    server.expect("all_ready")
    assert server.pids().keys() == ALL | {"frontend-1.1", "tokenizer-1.1"}


@pytest.mark.parametrize(
    ("script", "cause", "exit_status"),
    [
        ({"fail": "no such tensor"}, "ValueError: no such tensor", 1),
        ({"config_error": "use --fewer"}, "use --fewer", 78),
    ],
)
def test_failed_boot_ends_with_the_error_of_the_child(
    server: World, script: dict[str, str], cause: str, exit_status: int
) -> None:
    server.start({"executor-0": script, "core-0": {"never_ready": True}}, options=FORKS)
    server.expect("failed")
    status, _, words = server.end()
    assert status == exit_status
    assert f"quintet: executor 0: {cause}" in words
    wait_gone(list(server.pids().values()))


def test_dead_child_is_replaced_by_a_program(server: World) -> None:
    process = server.start(options=FORKS)
    server.expect("all_ready")
    kill(server.pids()["core-0.1"])
    server.expect("born", lambda event: event["me"] == "core-0.2")
    server.expect("topology", lambda event: event["slots"].get("core-0.2") == "READY")
    process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_silent_child_dumps_its_stack_and_is_replaced(server: World) -> None:
    config = make_config(server.run_dir, stall_s=2.0, heartbeat_s=0.2)
    process = server.start({"core-0.1": {"silent": True}}, config, FORKS)
    server.expect("topology", lambda event: event["slots"].get("core-0.2") == "READY")
    process.send_signal(signal.SIGTERM)
    status, _, words = server.end()
    assert status == 0
    assert "Fatal Python error: Aborted" in words


def test_kill_9_of_the_supervisor_leaves_no_process(server: World) -> None:
    process = server.start(options=FORKS)
    server.expect("all_ready")
    process.kill()
    wait_gone(list(server.pids().values()))


PROGRAM = """
import errno, os, signal, sys, threading
from pathlib import Path
import psutil
from quintet.deploy.supervisor.prefork import Prefork
from quintet.wire.ids import Role, WorkerId

prefork = Prefork(Path("."), None, dict.fromkeys(Role, "waits"))
children = psutil.Process().children
if "with a thread" in sys.argv:
    stop = threading.Event()
    threading.Thread(target=stop.wait).start()
    prefork.fork([Role.CORE])
    print(len(children()))
    stop.set()
else:
    if "SIGCHLD ignored" in sys.argv:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if "one process" in sys.argv:
        forks = [os.fork]

        def fork():
            if not forks:
                raise BlockingIOError(errno.EAGAIN, "no process left")
            return forks.pop()()

        os.fork = fork
    descriptors = os.listdir("/proc/self/fd")
    prefork.fork([Role.CORE, Role.TOKENIZER])
    print(len(children()))
    if "assigned" in sys.argv:
        core = prefork.take(WorkerId(Role.CORE, 0, 1))
        assert prefork.take(WorkerId(Role.CORE, 0, 1)) is None
        print(core.wait())
    prefork.end()
    print(len(children()))
    assert os.listdir("/proc/self/fd") == descriptors
"""

WAITS = """
import os, sys
words = sys.stdin.readline().split()
assert words == ["0", "1"], words
assert sys.argv[1:2] == ["--run-dir"] and __name__ == "__main__", sys.argv
assert os.getcwd() not in sys.path, "a file of the working directory would be a module of ours"
sys.exit(7)
"""


def run_program(folder: Path, *words: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    modules = folder / "modules"
    modules.mkdir()
    (modules / "waits.py").write_text(WAITS)
    path = f"{modules}:{HERE.parents[2] / 'src'}"
    done = subprocess.run(
        [sys.executable, "-m", "program", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_unassigned_children_are_ended(tmp_path: Path) -> None:
    assert run_program(tmp_path) == ["2", "0"]


def test_child_reads_its_slot_and_returns_its_exit_status(tmp_path: Path) -> None:
    assert run_program(tmp_path, "assigned") == ["2", "7", "0"]


def test_no_fork_with_threads(tmp_path: Path) -> None:
    assert run_program(tmp_path, "with a thread") == ["0"]


def test_children_are_ended_with_sigchld_ignored(tmp_path: Path) -> None:
    """The parent may ignore SIGCHLD, and an ignored signal is inherited."""
    assert run_program(tmp_path, "SIGCHLD ignored") == ["2", "0"]


def test_failed_fork_gives_fewer_children(tmp_path: Path) -> None:
    assert run_program(tmp_path, "one process") == ["1", "0"]
