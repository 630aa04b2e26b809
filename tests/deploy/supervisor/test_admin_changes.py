"""Administrative changes of a running server, over real processes with fake children."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.deploy.supervisor.supervised import Event, World, make_config, world

from quintet.deploy.cli.admin import ask, find_server
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.admin_server import (
    CommandError,
    Restart,
    Scale,
    Status,
    check_memory,
    duration,
    parse,
)
from quintet.process.child import CONFIG_FILE
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role


@pytest.fixture
def server(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as held:
        yield held


def states(event: Event) -> dict[str, str]:
    slots: dict[str, str] = event["slots"]
    return slots


def states_of(server: World, worker: str) -> list[str]:
    """Return the distinct states of a worker in the topologies that the children received, in order."""
    seen = [states(event).get(worker) for event in server.seen if event["event"] == "topology"]
    return list(dict.fromkeys(state for state in seen if state is not None))


def test_detokenizer_stops_after_its_replacement_is_ready(
    server: World, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    server.expect("all_ready")
    assert ask(server.run_dir, ["restart", "detokenizer"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "starting detokenizer-1.1"
    assert output[1].startswith("detokenizer-1.1 ready after ")
    assert output[2:] == [
        "retiring detokenizer-0.1", "detokenizer-0.1 left", "done: restart detokenizer",
    ]  # fmt: skip
    assert server.expect("drain")["me"] == "detokenizer-0.1"
    topology = server.expect("topology", lambda event: states(event).get("detokenizer-0.1") == "DOWN")
    assert states(topology)["detokenizer-1.1"] == "READY"
    assert "RETIRING" in states_of(server, "detokenizer-0.1")
    assert ask(server.run_dir, ["restart", "detokenizer"]) == 0
    assert capsys.readouterr().out.startswith("starting detokenizer-0.2\n"), (
        "the slot is reused under a new epoch"
    )


def test_wait_for_requests_in_flight_is_bounded(server: World, capsys: pytest.CaptureFixture[str]) -> None:
    server.start({"tokenizer-0": {"never_drained": True}})
    server.expect("all_ready")
    assert ask(server.run_dir, ["restart", "tokenizer", "drain-timeout=0.5"]) == 0
    output = capsys.readouterr().out
    assert "tokenizer-0.1 not drained after 0.5 s; other processes take over the requests" in output
    assert "tokenizer-0.1 left" in output


def test_scaling_up_and_down(server: World, capsys: pytest.CaptureFixture[str]) -> None:
    server.start()
    server.expect("all_ready")
    assert ask(server.run_dir, ["scale", "detokenizers=3", "frontends=2", "tokenizers=1"]) == 0
    output = capsys.readouterr().out
    assert "starting detokenizer-1.1, detokenizer-2.1\n" in output
    assert "there are 1 of tokenizer already" in output
    assert ask(server.run_dir, ["scale", "detokenizers=1"]) == 0
    assert "detokenizer-1.1, detokenizer-2.1 left" in capsys.readouterr().out
    assert ask(server.run_dir, ["status"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert sorted(rows) == [
        ["core-0.1", "ready"], ["detokenizer-0.1", "ready"], ["executor-0.1", "ready"],
        ["frontend-0.1", "ready"], ["frontend-1.1", "ready"], ["tokenizer-0.1", "ready"],
    ]  # fmt: skip


@pytest.mark.parametrize("role", ["core", "executor"])
def test_core_and_executor_restart_in_their_slot(
    server: World, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(options={"max_deaths": 0})
    server.expect("all_ready")
    for epoch in (2, 3):
        assert ask(server.run_dir, ["restart", role]) == 0, "a restart is not counted as a death"
        assert f"{role}-0.{epoch} ready after " in capsys.readouterr().out


def test_failed_boot_of_a_new_process_changes_nothing(
    server: World, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start({"tokenizer-1": {"fail": "no more memory"}})
    server.expect("all_ready")
    assert ask(server.run_dir, ["restart", "tokenizer"]) == 1
    assert "tokenizer-1.1: ValueError: no more memory" in capsys.readouterr().err
    assert ask(server.run_dir, ["status"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["tokenizer-0.1", "ready"] in rows
    assert not any(row[0].startswith("tokenizer-1") for row in rows if row)


def test_refused_start_of_a_new_process_changes_nothing(
    server: World, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(options={"refused": ["tokenizer-1.1"]})
    server.expect("all_ready")
    assert ask(server.run_dir, ["restart", "tokenizer"]) == 1
    assert "tokenizer-1.1: the process could not be started: [Errno 11]" in capsys.readouterr().err
    assert ask(server.run_dir, ["restart", "tokenizer"]) == 0  # as epoch 2


def test_one_change_at_a_time(server: World, capsys: pytest.CaptureFixture[str]) -> None:
    server.start({"tokenizer-0": {"never_drained": True}})
    server.expect("all_ready")
    first = threading.Thread(target=ask, args=(server.run_dir, ["restart", "tokenizer", "drain-timeout=600"]))
    first.start()
    server.expect("drain")
    assert ask(server.run_dir, ["restart", "core"]) == 1
    assert "restart tokenizer drain-timeout=600 is in progress" in capsys.readouterr().err
    assert server.process is not None
    server.process.terminate()
    first.join()
    assert "was given up: the server is stopping" in capsys.readouterr().err


def test_running_server_is_found_or_servers_are_listed(server: World, tmp_path: Path) -> None:
    parent = server.run_dir.parent
    with pytest.raises(ConfigError, match="no running server of this user"):
        find_server(tmp_path, None, None)
    with pytest.raises(ConfigError, match="is not the run folder of a running server"):
        find_server(parent, None, tmp_path)
    server.start(config=make_config(server.run_dir))
    server.expect("all_ready")
    assert find_server(parent, None, server.run_dir) == server.run_dir
    with pytest.raises(ConfigError, match=rf"listens on port 70000; running servers: .*{server.run_dir}"):
        find_server(parent, 70000, None)


def test_servers_of_other_versions_are_listed(tmp_path: Path) -> None:
    """Other versions' configurations may have unknown keys; one that is being written has no port yet."""
    folders = {name: tmp_path / f"quintet-{name}" for name in ("older", "newer", "starting")}
    topology = {
        "older": '{"frontend":{"port":1}}',
        "newer": '{"frontend":{"port":2},"kind":[]}',
        "starting": '{"fr',
    }
    with contextlib.ExitStack() as stack:
        for name, folder in folders.items():
            folder.mkdir()
            stack.callback(os.close, run_dirs.claim(folder))
            (folder / CONFIG_FILE).write_text(topology[name])
        assert find_server(tmp_path, 2, None) == folders["newer"]
        with pytest.raises(ConfigError, match=r"several servers are running: port 2 .*, port 1 "):
            find_server(tmp_path, None, None)


def test_commands_are_read() -> None:
    assert parse(["status"]) == Status()
    assert parse(["restart", "detokenizers"]) == Restart(Role.DETOKENIZER, None)
    assert parse(["scale", "frontend=2", "drain-timeout=9"]) == Scale({Role.FRONTEND: 2}, 9.0)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "use `status`, `restart ROLE` or `scale ROLE=COUNT …`"),
        (["restart"], "use `status`"),
        (
            ["restart", "nothing"],
            "unknown role 'nothing'; use one of frontend, tokenizer, core, executor, detokenizer",
        ),
        (["scale", "core=2"], "unknown role 'core'; use one of frontend, tokenizer, detokenizer"),
        (["scale", "tokenizers"], "'tokenizers' is not ROLE=COUNT, such as detokenizers=3"),
        (["scale", "tokenizers=0"], "the number of processes must be 1 to 64"),
        (["restart", "core", "drain-timeout=soon"], "must be a number of seconds"),
    ],
)
def test_invalid_command_lists_valid_ones(words: list[str], advice: str) -> None:
    with pytest.raises(CommandError) as error:
        parse(words)
    assert advice in str(error.value)


def test_durations_are_printed_readably() -> None:
    assert [duration(s) for s in (4.24, 185, 7800, 446_400)] == ["4.2 s", "3 m 05 s", "2 h 10 m", "5 d 04 h"]


def test_added_engine_needs_free_memory(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config = msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(config.cache, memory_bytes=3 << 30),
        executor=msgspec.structs.replace(config.executor, kind="torch", weight_bytes=1 << 30),
    )
    check_memory(config, -1, 0)
    check_memory(config, 2, 9 << 30)
    with pytest.raises(
        CommandError,
        match=r"2 more engines would take 8\.1 GiB .*1\.0 GiB of weights and 3\.0 GiB of KV.*but 8\.0 GiB",
    ):
        check_memory(config, 2, 8 << 30)
    check_memory(make_config(tmp_path), 2, 0)  # the mock has no weights
