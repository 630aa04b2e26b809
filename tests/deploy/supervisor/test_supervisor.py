"""Supervisor over real processes with fake children."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.deploy.supervisor.supervised import Event, World, kill, make_config, wait_gone, world

from quintet.deploy.supervisor.listener import bind_listener
from quintet.wire.errors import ConfigError

ALL = {"executor-0.1", "core-0.1", "tokenizer-0.1", "detokenizer-0.1", "frontend-0.1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as held:
        yield held


def slot_is(worker: str, state: str) -> Callable[[Event], bool]:
    return lambda event: event["slots"].get(worker) == state


def is_topology_with_all_ready(event: Event) -> bool:
    return event["event"] == "topology" and set(event["slots"].values()) == {"READY"}


def test_children_boot_concurrently_and_receive_the_topology(server: World) -> None:
    server.start()
    server.expect("all_ready")
    while {event["me"] for event in server.seen if is_topology_with_all_ready(event)} != ALL:
        server.expect("topology")
    topologies = [event for event in server.seen if event["event"] == "topology"]
    assert all(set(event["slots"]) == ALL for event in topologies), "starting children are published"
    assert server.pids().keys() == ALL
    listeners = {event["me"] for event in server.seen if event["event"] == "born" and event["listens"]}
    assert listeners == {"frontend-0.1"}


def test_startup_log_is_short_and_ends_with_the_url(server: World) -> None:
    process = server.start(config=make_config(server.run_dir, frontends=2, tokenizers=3))
    server.expect("all_ready")
    process.send_signal(signal.SIGTERM)
    _, output, _ = server.end()
    lines = output.splitlines()
    assert len(lines) < 20
    assert re.search(r"tokenizer ×3 +\d+\.\d s  epoch: 1", output)
    assert output.count("Quintet is ready: http://127.0.0.1:") == 1
    assert sum(line.strip().startswith("curl ") for line in lines) == 1


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
    server.start({"executor-0": script, "core-0": {"never_ready": True}})
    server.expect("failed")
    status, output, errors = server.end()
    assert status == exit_status
    assert f"quintet: executor 0: {cause}" in errors
    assert "ready:" not in output
    wait_gone(list(server.pids().values()))


def test_slow_boot_times_out(server: World) -> None:
    server.start({"core-0": {"never_ready": True}}, make_config(server.run_dir, boot_timeout_s=1.5))
    status, _, errors = server.end()
    assert status == 1
    assert re.search(r"core-0\.1\b.*: not ready within 1\.5 s", errors), (
        "on a slow machine other children are late too"
    )
    assert "--boot-timeout" in errors


def test_a_dead_child_is_replaced_under_the_next_epoch(server: World) -> None:
    process = server.start()
    server.expect("all_ready")
    kill(server.pids()["core-0.1"])
    server.expect("born", lambda event: event["me"] == "core-0.2")
    server.expect("topology", slot_is("core-0.2", "READY"))
    kill(server.pids()["core-0.2"])
    topology = server.expect("topology", slot_is("core-0.3", "READY"))
    assert set(topology["slots"]) == (ALL - {"core-0.1"}) | {"core-0.3"}
    process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_refused_start_is_repeated(server: World) -> None:
    server.start(options={"refused": ["detokenizer-0.2", "detokenizer-0.3"]})
    server.expect("all_ready")
    kill(server.pids()["detokenizer-0.1"])
    server.expect("topology", slot_is("detokenizer-0.4", "READY"))
    assert server.process is not None
    server.process.terminate()
    status, _, errors = server.end()
    assert status == 0
    assert "detokenizer-0.2 died (the process could not be started: [Errno 11]" in errors


def test_a_refused_start_fails_the_boot(server: World) -> None:
    server.start(options={"refused": ["core-0.1"]})
    status, _, errors = server.end()
    assert status == 1
    assert "quintet: core 0: the process could not be started: [Errno 11]" in errors
    wait_gone(list(server.pids().values()))


def test_refused_starts_end_the_server(server: World) -> None:
    refused = [f"detokenizer-0.{epoch}" for epoch in range(2, 9)]
    server.start(options={"refused": refused, "max_deaths": 3})
    server.expect("all_ready")
    kill(server.pids()["detokenizer-0.1"])
    status, _, errors = server.end()
    assert status == 1
    assert "died 4 times within 60 s, giving up; last: the process could not be started: [Errno 11]" in errors


def test_repeated_deaths_end_the_server(server: World) -> None:
    dying = {f"detokenizer-0.{epoch}": {"die_when_ready": True} for epoch in range(2, 9)}
    server.start(dying, options={"max_deaths": 3})
    server.expect("all_ready")
    kill(server.pids()["detokenizer-0.1"])
    status, _, errors = server.end()
    assert status == 1
    assert "died 4 times within 60 s, giving up" in errors
    wait_gone(list(server.pids().values()))


def test_child_with_a_config_error_is_not_restarted(server: World) -> None:
    server.start({"tokenizer-0.2": {"config_error": "tokenizer.json is gone"}})
    server.expect("all_ready")
    kill(server.pids()["tokenizer-0.1"])
    status, _, errors = server.end()
    assert status == 78
    assert "quintet: tokenizer 0: tokenizer.json is gone" in errors


def test_a_silent_child_dumps_its_stack_and_is_replaced(server: World) -> None:
    process = server.start(
        {"core-0.1": {"silent": True}}, make_config(server.run_dir, stall_s=2.0, heartbeat_s=0.2)
    )
    server.expect("topology", slot_is("core-0.2", "READY"))
    process.send_signal(signal.SIGTERM)
    status, _, errors = server.end()
    assert status == 0
    assert "core-0.1: no heartbeat" in errors
    assert "Fatal Python error: Aborted" in errors
    assert "signal.pause" in errors or "in _run" in errors


def test_work_without_progress_is_published_as_stalled(server: World) -> None:
    config = make_config(server.run_dir, stall_s=60.0, heartbeat_s=0.2)
    server.start({"core-0": {"pending": 3}}, config)
    server.expect("topology", slot_is("core-0.1", "STALLED"))
    assert "core-0.2" not in server.pids()


def test_stopped_process_is_logged_dumped_and_replaced(server: World) -> None:
    process = server.start(config=make_config(server.run_dir, stall_s=3.0))
    server.expect("all_ready")
    os.kill(server.pids()["executor-0.1"], signal.SIGSTOP)
    topology = server.expect("topology", slot_is("executor-0.1", "STALLED"))
    assert not any(event.get("me") == "executor-0.2" for event in server.seen), "logged before it is replaced"
    assert topology["slots"]["core-0.1"] == "READY"
    server.expect("topology", slot_is("executor-0.2", "READY"))
    process.send_signal(signal.SIGTERM)
    status, _, errors = server.end()
    assert status == 0
    assert "executor-0.1: no heartbeat" in errors
    assert "Fatal Python error: Aborted" in errors, "a stopped process must be continued to dump its stack"


def test_only_the_hung_executor_is_logged_and_replaced(server: World) -> None:
    hung = {"executor-0.1": {"pending": 1}, "core-0": {"pending": 4}}
    process = server.start(hung, make_config(server.run_dir, stall_s=3.0))
    server.expect("topology", slot_is("executor-0.1", "STALLED"))
    topology = server.expect("topology", slot_is("executor-0.2", "READY"))
    assert topology["slots"]["core-0.1"] == "READY"
    process.send_signal(signal.SIGTERM)
    assert "executor-0.1: 1 pending, none completed for" in server.end()[2]


def test_standby_takes_the_slot_of_a_dead_child(server: World) -> None:
    server.start(config=make_config(server.run_dir, standby=True))
    server.expect("all_ready")
    regulars = set(server.pids().values())
    standbys = {server.expect("prepared", lambda e: e["pid"] not in regulars)["pid"] for _ in range(2)}
    kill(server.pids()["detokenizer-0.1"])
    replacement = server.expect("born", lambda event: event["me"] == "detokenizer-0.2")
    assert replacement["pid"] in standbys
    server.expect("topology", slot_is("detokenizer-0.2", "READY"))
    kill(server.pids()["tokenizer-0.1"])
    assert server.expect("born", lambda event: event["me"] == "tokenizer-0.2")["pid"] in standbys
    server.expect("prepared", lambda event: event["pid"] not in standbys)  # another standby follows


def test_metrics_of_all_processes(server: World) -> None:
    server.start({"frontend-0": {"ask_metrics": True}})
    report = server.expect("report")
    assert report["query_id"] == 7
    assert set(report["workers"]) == ALL


def test_counters_of_dead_and_retired_processes_are_kept(server: World) -> None:
    counting = {name: {"steps": 5} for name in ("detokenizer-0.1", "detokenizer-0.2")}
    counting_core = {"core-0": {"steps_per_message": 1}}
    server.start({"frontend-0": {"ask_metrics": True, "steps": 7}, **counting, **counting_core})
    server.expect("all_ready")
    before = server.expect("report", lambda event: event["steps"].get("detokenizer-0") == 5)
    assert before["steps"]["frontend-0"] == 7, "the requesting process has counted too"
    kill(server.pids()["detokenizer-0.1"])
    after = server.expect(
        "report",
        lambda event: "detokenizer-0.2" in event["workers"] and event["steps"]["detokenizer-0"] == 10,
    )
    assert after["steps"]["core-0"] >= before["steps"].get("core-0", 0)


def test_drain_waits_for_frontends_then_stops_all(server: World) -> None:
    process = server.start(config=make_config(server.run_dir, frontends=2))
    port = server.expect("listening")["port"]
    server.expect("all_ready")
    process.send_signal(signal.SIGTERM)
    drained = {server.expect("drain")["me"], server.expect("drain")["me"]}
    assert drained == {"frontend-0.1", "frontend-1.1"}
    assert server.end()[0] == 0
    wait_gone(list(server.pids().values()))
    assert not server.run_dir.exists()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_drain_is_cut_off_at_its_timeout(server: World) -> None:
    config = make_config(server.run_dir, drain_timeout_s=0.3)
    process = server.start({"frontend-0": {"never_drained": True}}, config)
    server.expect("all_ready")
    process.send_signal(signal.SIGINT)
    status, _, errors = server.end()
    assert status == 0
    assert "drain timeout" in errors


@pytest.mark.parametrize(("second", "exit_status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_kills_at_once(server: World, second: signal.Signals, exit_status: int) -> None:
    process = server.start({"frontend-0": {"hang_on_drain": True}})
    server.expect("all_ready")
    process.send_signal(signal.SIGTERM)
    server.expect("drain")
    process.send_signal(second)
    assert server.end()[0] == exit_status
    wait_gone(list(server.pids().values()))


def test_signal_sent_twice_at_once_counts_once(server: World) -> None:
    process = server.start()
    server.expect("all_ready")
    process.send_signal(signal.SIGSTOP)  # so that both are pending
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert server.end()[0] == 0


def test_a_signal_while_booting_leaves_nothing(server: World) -> None:
    process = server.start({"executor-0": {"never_ready": True}})
    server.expect("born", lambda event: event["me"] == "executor-0.1")
    process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 143
    wait_gone(list(server.pids().values()))


def test_kill_9_of_the_supervisor_leaves_no_process(server: World) -> None:
    process = server.start()
    server.expect("all_ready")
    process.kill()
    wait_gone(list(server.pids().values()))


def test_kill_9_while_booting_leaves_no_process(server: World) -> None:
    process = server.start({"executor-0": {"never_ready": True}})
    while set(server.pids()) != ALL:
        server.expect("born")
    process.kill()
    wait_gone(list(server.pids().values()))


def test_kill_9_with_a_stopped_and_a_dead_child_leaves_no_process_and_a_free_port(server: World) -> None:
    process = server.start(config=make_config(server.run_dir, standby=True))
    port = server.expect("listening")["port"]
    server.expect("all_ready")
    standby = server.expect("prepared", lambda event: event["pid"] not in server.pids().values())["pid"]
    pids = server.pids()
    process.send_signal(signal.SIGSTOP)
    kill(pids["tokenizer-0.1"])  # remains a zombie until reaped
    os.kill(pids["core-0.1"], signal.SIGSTOP)
    process.kill()
    own = process.pid  # its threads may outlive its children for a moment
    wait_gone([own, *pids.values(), standby])
    with bind_listener("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize("port", [-1, 65536, 70_000_000])
def test_invalid_port_is_rejected(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"--port is {port}; a port is from 0 \(a free one\) to 65535"):
        bind_listener("127.0.0.1", port)


def test_external_slots_are_ready_and_not_spawned(server: World) -> None:
    server.start(config=make_config(server.run_dir, frontends=0, external_frontends=1))

    def complete(event: Event) -> bool:
        return event["me"] == "core-0.1" and set(event["slots"].values()) == {"READY"}

    topology = server.expect("topology", complete)
    assert set(topology["slots"]) == ALL
    assert "frontend-0.1" not in server.pids()


def test_all_processes_stop_when_the_parent_ends(server: World) -> None:
    child_end, parent_end = os.pipe()
    report, child_report = os.pipe()
    config = make_config(server.run_dir, frontends=0, external_frontends=1)
    options = {"parent_fd": child_end, "report_fd": child_report}
    server.start(config=config, options=options, pass_fds=(child_end, child_report))
    os.close(child_end)
    os.close(child_report)
    with os.fdopen(report) as pipe:
        assert json.loads(pipe.readline()) == {"ready": True}
    os.close(parent_end)
    status, output, _ = server.end()
    assert status == 0
    assert output == ""
    wait_gone(list(server.pids().values()))


def test_boot_failure_is_reported_to_the_parent(server: World) -> None:
    report, child_report = os.pipe()
    server.start(
        {"executor-0": {"fail": "boom"}}, options={"report_fd": child_report}, pass_fds=(child_report,)
    )
    os.close(child_report)
    with os.fdopen(report) as pipe:
        assert json.loads(pipe.readline())["error"].startswith("executor 0: ValueError: boom")
    assert server.end()[0] == 1


def test_external_process_can_fail_the_boot(server: World) -> None:
    server.start(options={"external": "no memory"})
    assert server.expect("failed")["cause"] == "no memory"
    status, _, log = server.end()
    assert status == 78 and "external: no memory" in log
