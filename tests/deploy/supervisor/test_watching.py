"""Parts of the supervisor: restart policy, stall detection, listeners, startup messages."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import socket
import subprocess
from collections import deque
from pathlib import Path

import msgspec
import pytest
from tests.deploy.supervisor.supervised import make_config

from quintet.deploy.supervisor.listener import PortInUse, bind_listener, bind_unix
from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.deploy.supervisor.restarts import RestartPolicy, policy_of
from quintet.deploy.supervisor.spawn import Spawner, StandbyProcesses
from quintet.deploy.supervisor.startup_log import (
    base_url,
    can_chat,
    chat_line,
    child_failure,
    curl_line,
)
from quintet.deploy.supervisor.watch import Watch, waited_for_processor_ns
from quintet.process.child import error_file
from quintet.wire.config import EngineConfig, ProcessesConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import Heartbeat, SlotState


def test_restart_backoff_grows_until_it_gives_up() -> None:
    policy = RestartPolicy(max_deaths=4, window_s=60, first_backoff_s=1.0, max_backoff_s=3.0)
    deaths: deque[float] = deque()
    assert [policy.delay_s(deaths, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 1.0, 2.0, 3.0, None]


def test_old_deaths_expire() -> None:
    policy = RestartPolicy(max_deaths=1, window_s=60)
    deaths: deque[float] = deque()
    assert [policy.delay_s(deaths, now) for now in (0.0, 61.0, 122.0, 150.0)] == [0.0, 0.0, 0.0, None]


def beat(slot: SlotRecord, progress: int, pending: int, now: float) -> None:
    slot.beat(Heartbeat(slot.worker, progress, pending, 0), now)


class SignalRecorder:
    """Child that records its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)


def silent_for(
    tmp_path: Path, waited_share: float, until_s: float, stall_s: float = 10.0
) -> tuple[SlotRecord, list[int]]:
    """Run a watch over an executor with a last heartbeat at 0; it waits for a processor for ``waited_share`` of the
    time.
    """
    processes, clock = ProcessesConfig(stall_s=stall_s), [0.0]
    table = SlotTable(tmp_path, processes)
    executor = next(iter(table))
    executor.became_ready({}, now=0.0)
    victim = SignalRecorder()
    executor.process = victim  # type: ignore[assignment]  # as much of a process as the watch needs
    watch = Watch(table, processes, lambda _pid: int(clock[0] * waited_share * 1e9))
    while clock[0] < until_s:
        watch.check(clock[0])
        clock[0] += 0.2
    return executor, victim.signals


def test_a_silent_process_is_aborted_continued_and_killed(tmp_path: Path) -> None:
    slot, signals = silent_for(tmp_path, waited_share=0.0, until_s=9.0)
    assert (slot.state, signals) == (SlotState.STALLED, [])
    slot, signals = silent_for(tmp_path, waited_share=0.0, until_s=13.0)
    assert signals == [signal.SIGABRT, signal.SIGCONT]
    slot, signals = silent_for(tmp_path, waited_share=0.0, until_s=14.0)
    assert signals[2] == signal.SIGKILL


def test_process_waiting_for_cpu_is_logged_with_longer_timeout(tmp_path: Path) -> None:
    slot, signals = silent_for(tmp_path, waited_share=0.9, until_s=50.0)
    assert (slot.state, signals) == (SlotState.STALLED, [])
    slot, signals = silent_for(tmp_path, waited_share=0.9, until_s=62.0)
    assert signals == [signal.SIGABRT, signal.SIGCONT]


def test_heartbeats_without_progress_triple_the_timeout(tmp_path: Path) -> None:
    def signals_after(until_s: float) -> list[int]:
        processes, victim = ProcessesConfig(stall_s=10.0), SignalRecorder()
        table = SlotTable(tmp_path, processes)
        executor = next(iter(table))
        executor.became_ready({}, now=0.0)
        executor.process = victim  # type: ignore[assignment]  # as much of a process as the watch needs
        watch = Watch(table, processes, lambda _pid: 0)
        for tick in range(int(until_s / 0.2)):
            beat(executor, progress=5, pending=1, now=0.2 * tick)
            watch.check(0.2 * tick)
        assert executor.state is SlotState.STALLED
        return victim.signals

    assert signals_after(29.0) == []
    assert signals_after(33.0) == [signal.SIGABRT, signal.SIGCONT]


def test_cpu_wait_time_is_read_from_the_system() -> None:
    assert waited_for_processor_ns(os.getpid()) > 0
    assert waited_for_processor_ns(1 << 22) == 0, "no such process"


def test_cpu_wait_time_includes_children(tmp_path: Path) -> None:
    """Ranks of an executor are children of its first rank, which waits for them."""
    for pid, task, waited, children in ((1, 1, 5, ""), (1, 2, 7, "3 4 "), (3, 3, 2, ""), (4, 4, 90, "")):
        folder = tmp_path / str(pid) / "task" / str(task)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"1000 {waited} 3\n")
        (folder / "children").write_text(children)
    assert [waited_for_processor_ns(pid, tmp_path) for pid in (1, 3)] == [90, 2]


def test_cpu_wait_time_is_unknown_without_free_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert waited_for_processor_ns(os.getpid()) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class RefusedSpawner(Spawner):
    """The system refuses to start processes."""

    num_tries = 0

    def spawn_standby(self, role: Role) -> subprocess.Popen[bytes]:
        self.num_tries += 1
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_refused_standby_is_tried_again_later(tmp_path: Path) -> None:
    spawner = RefusedSpawner(tmp_path, {}, None)
    standby = StandbyProcesses(spawner, [Role.TOKENIZER])
    for now in range(100):
        standby.replenish(float(now))
    assert 2 <= spawner.num_tries <= 10


def ready_watch(tmp_path: Path) -> tuple[Watch, SlotRecord, SlotRecord]:
    """Return a watch, the executor's slot and the core's; all became ready at 0."""
    processes = ProcessesConfig()
    table = SlotTable(tmp_path, processes)
    for slot in table:
        slot.became_ready({}, now=0.0)
    executor, core = list(table)[:2]
    return Watch(table, processes), executor, core


def test_idle_process_is_healthy(tmp_path: Path) -> None:
    watch, executor, core = ready_watch(tmp_path)
    for now in (1.0, 5000.0, 9000.0):
        beat(executor, progress=7, pending=0, now=now)
        beat(core, progress=7, pending=0, now=now)
        assert not watch.trouble(executor, now + 0.4, 1.5, 1.5)
        assert not watch.trouble(core, now + 0.4, 1.5, 1.5)


def test_silence_is_a_stall(tmp_path: Path) -> None:
    watch, executor, _ = ready_watch(tmp_path)
    beat(executor, progress=7, pending=0, now=10.0)
    assert not watch.trouble(executor, 11.4, 1.5, 1.5)
    assert watch.trouble(executor, 11.6, 1.5, 1.5) == "no heartbeat for 1.6 s"


def test_stall_time_counts_from_arrival_of_work(tmp_path: Path) -> None:
    watch, executor, _ = ready_watch(tmp_path)
    beat(executor, progress=7, pending=0, now=100.0)
    for now in (100.4, 100.8, 101.2):
        beat(executor, progress=7, pending=2, now=now)
        assert not watch.trouble(executor, now, 1.5, 1.5)
    beat(executor, progress=7, pending=2, now=101.6)
    assert watch.trouble(executor, 101.6, 1.5, 1.5) == "2 pending, none completed for 1.6 s"
    beat(executor, progress=8, pending=2, now=102.0)
    assert not watch.trouble(executor, 102.0, 1.5, 1.5)


def test_long_step_is_no_stall(tmp_path: Path) -> None:
    watch, executor, core = ready_watch(tmp_path)
    for tick in range(500):
        now = 0.4 * tick
        beat(executor, progress=1000 + tick, pending=1, now=now)
        beat(core, progress=3, pending=5, now=now)
        assert not watch.trouble(executor, now, 1.5, 1.5)
        assert not watch.trouble(core, now, 1.5, 1.5)


def test_hung_executor_does_not_stall_the_core(tmp_path: Path) -> None:
    watch, executor, core = ready_watch(tmp_path)
    for tick in range(20):
        beat(executor, progress=1000, pending=1, now=0.4 * tick)
        beat(core, progress=3, pending=5, now=0.4 * tick)
    assert watch.trouble(executor, 7.6, 1.5, 1.5)
    assert not watch.trouble(core, 7.6, 1.5, 1.5)


def test_lost_plan_stalls_the_core(tmp_path: Path) -> None:
    watch, executor, core = ready_watch(tmp_path)
    for tick in range(20):
        beat(executor, progress=1000, pending=0, now=0.4 * tick)
        beat(core, progress=3, pending=5, now=0.4 * tick)
    assert not watch.trouble(executor, 7.6, 1.5, 1.5)
    assert watch.trouble(core, 7.6, 1.5, 1.5) == "5 pending, none completed for 7.6 s"


def test_pause_of_the_supervisor_is_no_silence(tmp_path: Path) -> None:
    watch, executor, _ = ready_watch(tmp_path)
    executor.process = subprocess.Popen(["true"])
    executor.process.wait()
    beat(executor, progress=7, pending=0, now=9.8)
    watch.check(10.0)
    watch.check(70.0)
    assert executor.state is SlotState.READY
    watch.check(70.2)
    watch.check(70.9)
    watch.check(71.6)
    assert executor.state is SlotState.STALLED


def test_executor_deaths_during_poison_isolation_are_allowed() -> None:
    policy, deaths = policy_of(Role.EXECUTOR), deque[float]()
    delays = [policy.delay_s(deaths, float(now)) for now in range(13)]
    assert delays[-1] is None
    assert all(delay is not None and delay <= 1.0 for delay in delays[:-1])
    assert policy_of(Role.CORE).max_deaths < policy.max_deaths


def test_vacant_slot_is_refilled_under_its_next_epoch(tmp_path: Path) -> None:
    table = SlotTable(tmp_path, ProcessesConfig(detokenizers=2))
    first, second = table.active(Role.DETOKENIZER)
    first.is_retiring = True
    assert table.active(Role.DETOKENIZER) == [second]
    published = {slot.worker: slot for slot in table.topology(draining=False).slots}
    assert published[first.worker].retired
    assert table.allocate(Role.DETOKENIZER) == [first]
    assert first.worker == WorkerId(Role.DETOKENIZER, 0, 2)
    first.is_retiring = False
    assert table.allocate(Role.DETOKENIZER)[0].worker == WorkerId(Role.DETOKENIZER, 2, 1)


def test_replica_processes_share_one_index(tmp_path: Path) -> None:
    table = SlotTable(tmp_path, ProcessesConfig(engines=2))
    executor = table.active(Role.EXECUTOR)[1]
    executor.is_retiring = True
    workers = [slot.worker for slot in table.allocate(Role.EXECUTOR, Role.CORE)]
    assert workers == [WorkerId(Role.EXECUTOR, 2, 1), WorkerId(Role.CORE, 2, 1)]
    table.active(Role.CORE)[1].is_retiring = True
    workers = [slot.worker for slot in table.allocate(Role.EXECUTOR, Role.CORE)]
    assert workers == [WorkerId(Role.EXECUTOR, 1, 2), WorkerId(Role.CORE, 1, 2)]


def test_metrics_without_an_update_are_kept() -> None:
    slot = SlotRecord(Role.CORE, 0)
    slot.beat(Heartbeat(slot.worker, 0, 0, 5, b"figures"), 0.0)
    slot.beat(Heartbeat(slot.worker, 0, 0, 6, b""), 1.0)
    assert (slot.metrics, slot.cpu_ns) == (b"figures", 6)


def test_only_the_newest_epoch_reports_for_a_slot(tmp_path: Path) -> None:
    table = SlotTable(tmp_path, ProcessesConfig(frontends=2, external_frontends=1))
    frontends = [slot.worker for slot in table if slot.role is Role.FRONTEND]
    assert frontends == [WorkerId(Role.FRONTEND, index, 1) for index in range(3)]
    slot = table.of(WorkerId(Role.CORE, 0, 1))
    assert slot is not None
    slot.epoch = 2
    assert table.of(WorkerId(Role.CORE, 0, 1)) is None
    assert table.of(WorkerId(Role.CORE, 0, 2)) is slot
    assert table.of(WorkerId(Role.CORE, 9, 1)) is None
    versions = [table.topology(draining=False).version for _ in range(3)]
    assert versions == [1, 2, 3]
    assert not any(figures.worker == frontends[2] for figures in table.process_metrics(0.0)), (
        "external slots have no metrics"
    )


def test_free_port_is_chosen_and_used_one_is_named() -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            bind_listener("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no host at all"])
def test_foreign_address_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind_listener(host, 0)


def test_a_name_with_both_families_is_bound_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    ipv4 = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    ipv6 = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ipv6 + ipv4)
    with bind_listener("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_missing_address_family_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = [(999, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: unsupported)
    with pytest.raises(ConfigError, match="cannot listen on ::1 port 0: Address family not supported"):
        bind_listener("::1", 0)


def test_an_overlong_socket_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on --uds /.*: AF_UNIX path too long"):
        bind_unix(str(tmp_path / ("x" * 120)))


def configured(tmp_path: Path, host: str, **model: str) -> EngineConfig:
    config = make_config(tmp_path)
    return msgspec.structs.replace(
        config,
        frontend=msgspec.structs.replace(config.frontend, host=host, port=80, api_keys=["secret"]),
        model=msgspec.structs.replace(config.model, **model),
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")],
)
def test_url_can_be_opened_locally(tmp_path: Path, host: str, url: str) -> None:
    assert base_url(configured(tmp_path, host)) == url


def test_curl_command_works_and_shows_no_key(tmp_path: Path) -> None:
    for templates, route, field in (
        ({"default": "T"}, "/v1/chat/completions", "messages"),
        ({"rag": "T"}, "/v1/completions", "prompt"),
        ({}, "/v1/completions", "prompt"),
    ):
        config = make_config(tmp_path)
        config = msgspec.structs.replace(
            configured(tmp_path, "127.0.0.1"),
            model=msgspec.structs.replace(config.model, chat_templates=templates),
        )
        line = curl_line(config)
        words = shlex.split(line)
        assert f"http://127.0.0.1:80{route}" in words
        assert field in msgspec.json.decode(words[words.index("-d") + 1])
        assert "secret" not in line
        assert "$YOUR_API_KEY" in line


@pytest.mark.parametrize(
    ("templates", "is_offered"), [({"default": "T"}, True), ({"rag": "T"}, False), ({}, False)]
)
def test_chat_example_is_shown_for_chat_models_only(
    tmp_path: Path, templates: dict[str, str], is_offered: bool
) -> None:
    config = configured(tmp_path, "127.0.0.1")
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, chat_templates=templates)
    )
    assert can_chat(config) is is_offered
    words = shlex.split(chat_line(config))
    assert words[1:] == ["chat", "--url", "http://127.0.0.1:80", "--api-key", "$YOUR_API_KEY"]


@pytest.mark.parametrize(
    ("status", "words", "cause", "hint"),
    [
        (-9, None, "was killed by SIGKILL", "out of memory"),
        (1, "ModuleNotFoundError: No module named 'x'", "No module named 'x'", "make install"),
        (1, "ValueError: odd", "ValueError: odd", "--executor mock"),
        (78, "max_model_len is odd", "max_model_len is odd", ""),
        (5, None, "exited with status 5", "--executor mock"),
    ],
)
def test_exit_is_explained(tmp_path: Path, status: int, words: str | None, cause: str, hint: str) -> None:
    slot = SlotRecord(Role.EXECUTOR, 0)
    if words is not None:
        error_file(tmp_path, slot.worker).write_text(words)
    failure = child_failure(tmp_path, slot, status)
    assert cause in failure.cause
    assert hint in failure.hint
    assert bool(failure.hint) == bool(hint)
    assert failure.exit_code == (78 if status == 78 else 1)


def test_exit_is_explained_without_a_readable_error_file(tmp_path: Path) -> None:
    slot = next(iter(SlotTable(tmp_path, ProcessesConfig())))
    error_file(tmp_path, slot.worker).mkdir()
    assert (
        child_failure(tmp_path, slot, 3).cause == "the process exited with status 3 without an error message"
    )
